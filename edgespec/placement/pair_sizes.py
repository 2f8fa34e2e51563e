"""A pair's weights by size beside one reading of the memory: whatever is planned for a run is planned in these."""

from __future__ import annotations

from functools import cached_property

from edgespec.pair.pair import ModelPair
from edgespec.placement.largest_tree import LargestTree, largest_tree_that_fits
from edgespec.placement.place import Memory, PairWeights, PlacedWeights, place_weights, read_memory
from edgespec.placement.run_config import RunConfig
from edgespec.placement.weights import Weights, notes_of_draft, weights_by_size
from edgespec.tree.settings import TreeSettings


class PairSizes:
    """A pair's weights, known by size, and the memory that they may take.

    The memory is read once, and each skeleton is built once, when a plan first needs it. Plans may differ in trees,
    texts and lengths; formats, device and limits are those of `run_config`.
    """

    def __init__(self, pair: ModelPair, run_config: RunConfig) -> None:
        self.pair, self.run_config = pair, run_config
        self._placed: dict[tuple[TreeSettings, RunConfig], PlacedWeights] = {}

    @cached_property
    def memory(self) -> Memory:
        """The memory that was free when it was first needed, within the limits."""
        return read_memory(self.run_config.limits, self.run_config.device)

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
            weights = PairWeights(target=self.target, draft=self.draft if tree.policy != "none" else None)
            self._placed[key] = place_weights(weights, tree, run_config, self.memory)
        return self._placed[key]

    def largest(self, tree: TreeSettings, run_config: RunConfig, *, slack: float) -> LargestTree:
        """Return the largest trees of this kind that leave the layers where they are; raises EdgespecError."""
        return largest_tree_that_fits(
            tree, lambda tree: self.place(tree, run_config), num_texts=run_config.num_texts, slack=slack
        )

    def notes(self, tree: TreeSettings, run_config: RunConfig) -> tuple[str, ...]:
        """Return what a person should know of the draft that grows these trees."""
        draft = self.draft if tree.policy != "none" else None
        return notes_of_draft(self.target, draft, run_config.context_tokens)
