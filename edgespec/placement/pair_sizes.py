"""A pair's weights by size beside one reading of the memory: whatever is planned for a run is planned in these."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

from edgespec.errors import EdgespecError
from edgespec.pair.pair import ModelPair
from edgespec.pair.tree_support import tree_support
from edgespec.placement.place import Memory, PairWeights, PlacedWeights, place_weights, read_memory
from edgespec.placement.run_config import RunConfig
from edgespec.placement.weights import Weights, notes_of_weights, weights_by_size
from edgespec.tree.policies import POLICIES
from edgespec.tree.settings import MAX_LOOKED_UP_LAYERS, TreeSettings

LARGER_SIZES = {
    "size": (256, 64, 16),
    "draft_tokens": (16, 8, 4),
}  # nodes that are tried, by the setting that limits them
ALL_NODES = 1024  # of all texts' trees

PlaceTree = Callable[[TreeSettings], PlacedWeights]


class PairSizes:
    """A pair's weights, known by size, and the memory that they may take.

    The memory is read once, and each skeleton is built once, when a plan first needs it. Plans may differ in trees,
    texts and lengths; formats, device and limits are those of `run_config`.
    """

    def __init__(self, pair: ModelPair, run_config: RunConfig, *, memory: Memory | None = None) -> None:
        """`memory` is what another plan leaves; None: what is free, within the limits."""
        self.pair, self.run_config, self._memory = pair, run_config, memory
        self._placed: dict[tuple[TreeSettings, RunConfig], PlacedWeights] = {}

    @cached_property
    def memory(self) -> Memory:
        """The memory for this pair: what was free when it was first needed, within the limits."""
        return self._memory or read_memory(self.run_config.limits, self.run_config.device)

    @cached_property
    def target(self) -> Weights:
        """The target's weights."""
        return weights_by_size(self.pair.target, dtype=self.run_config.dtype, quant=self.run_config.quant)

    @cached_property
    def draft(self) -> Weights | None:
        """The draft's weights; None where there is none."""
        model = self.pair.draft
        if model is None:
            return None
        return weights_by_size(model, dtype=self.run_config.dtype, quant=self.run_config.draft_quant)

    def place(self, tree: TreeSettings, run_config: RunConfig) -> PlacedWeights:
        """Place the weights beside these trees, without the draft where there are none.

        Raises EdgespecError, with cheaper settings, where they do not fit.
        """
        key = (tree, run_config)
        if key not in self._placed:
            weights = PairWeights(target=self.target, draft=self.draft if tree.needs_draft else None)
            self._placed[key] = place_weights(weights, tree, run_config, self.memory)
        return self._placed[key]

    def largest(self, tree: TreeSettings, run_config: RunConfig, *, slack: float) -> tuple[TreeSettings, PlacedWeights]:
        """Place the largest trees of this kind that leave the layers where they are; raises EdgespecError."""

        def place(tree: TreeSettings) -> PlacedWeights:
            return self.place(tree, run_config)

        # A chain is not longer than what is looked up.
        most_nodes = MAX_LOOKED_UP_LAYERS if tree_support(self.pair.target).name == "chains" else ALL_NODES
        return largest_tree_that_fits(tree, place, num_texts=run_config.num_texts, slack=slack, most_nodes=most_nodes)

    def notes(self, tree: TreeSettings, run_config: RunConfig) -> tuple[str, ...]:
        """Return what a person should know of the weights, and of the draft that grows these trees."""
        draft = self.draft if tree.needs_draft else None
        context_tokens, device = run_config.context_tokens, run_config.device
        return notes_of_weights(self.target, draft, context_tokens=context_tokens, device=device)


def largest_tree_that_fits(
    tree: TreeSettings, place: PlaceTree, *, num_texts: int, slack: float, most_nodes: int = ALL_NODES
) -> tuple[TreeSettings, PlacedWeights]:
    """Place the largest trees of this kind for which no more is streamed than for `tree`, but for a share of `slack`.

    The trees of `num_texts` texts share each pass, and none of the larger ones has more than `most_nodes`. Where `tree`
    does not fit, smaller ones are tried. Raises EdgespecError where none fits.
    """
    budget = POLICIES[tree.policy].budget
    sizes = LARGER_SIZES[budget] if budget is not None else ()

    def sized(size: int) -> TreeSettings:
        changed: dict[str, Any] = {str(budget): size}
        return replace(tree, **changed)

    try:
        weights = place(tree)
    except EdgespecError:
        for smaller in (sized(size) for size in sizes if size < tree.num_nodes):
            try:
                return smaller, place(smaller)
            except EdgespecError:
                continue
        raise
    most_bytes = (1 + slack) * weights.placement.pass_bytes
    most_nodes = min(most_nodes, ALL_NODES // num_texts)
    for larger in (sized(size) for size in sizes if tree.num_nodes < size <= most_nodes):
        try:
            found = place(larger)
        except EdgespecError:
            continue
        if found.placement.pass_bytes <= most_bytes:
            return larger, found
    return tree, weights
