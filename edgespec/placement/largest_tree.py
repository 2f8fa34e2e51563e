"""How large trees that tune themselves may become, which is settled before weights are placed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from edgespec.errors import EdgespecError
from edgespec.placement.place import PlacedWeights
from edgespec.tree.policies import POLICIES
from edgespec.tree.settings import TreeSettings

LARGER_SIZES = {
    "size": (256, 64, 16),
    "draft_tokens": (16, 8, 4),
}  # nodes that are tried, by the setting that limits them

ALL_NODES = 1024  # of all texts' trees


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestTree:
    """The largest trees that memory is planned for, and where the weights live beside them."""

    tree: TreeSettings
    weights: PlacedWeights


def largest_tree_that_fits(
    tree: TreeSettings, place: Callable[[TreeSettings], PlacedWeights], *, num_texts: int, slack: float
) -> LargestTree:
    """Return the largest trees of this kind for which no more is streamed than for `tree`, but for a share of `slack`.

    The trees of `num_texts` texts share each pass.

    Where `tree` does not fit, smaller ones are tried. `place` is `place_weights` of the trees. Raises EdgespecError
    where none fits.
    """
    budget = POLICIES[tree.policy].budget
    sizes = LARGER_SIZES[budget] if budget is not None else ()

    def sized(size: int) -> TreeSettings:
        changed: dict[str, Any] = {str(budget): size}
        return replace(tree, **changed)

    own = _placed_first([tree, *(sized(size) for size in sizes if size < tree.num_nodes)], place)
    if own.tree != tree:
        return own
    most_bytes = (1 + slack) * own.weights.placement.streamed_bytes
    most_nodes = ALL_NODES // num_texts
    for larger in (sized(size) for size in sizes if tree.num_nodes < size <= most_nodes):
        try:
            weights = place(larger)
        except EdgespecError:
            continue
        if weights.placement.streamed_bytes <= most_bytes:
            return LargestTree(tree=larger, weights=weights)
    return own


def _placed_first(trees: list[TreeSettings], place: Callable[[TreeSettings], PlacedWeights]) -> LargestTree:
    """Return the first trees that fit; raises the first one's error where none do."""
    errors: list[EdgespecError] = []
    for tree in trees:
        try:
            return LargestTree(tree=tree, weights=place(tree))
        except EdgespecError as error:
            errors.append(error)
    raise errors[0]
