"""Room for trees that tune themselves: as much as pushes no layers out, and never a failure where less fits."""

from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.errors import EdgespecError
from edgespec.placement.pair_sizes import largest_tree_that_fits
from edgespec.tree.settings import TreeSettings


def place(streamed_bytes: dict[int, int]) -> Any:
    """A machine that streams so much for trees of so many nodes, and has no room for others."""

    def placed(tree: TreeSettings) -> Any:
        if tree.num_nodes not in streamed_bytes:
            raise EdgespecError("E_MEMORY", f"{tree.num_nodes} nodes do not fit.", "Use less.")
        return SimpleNamespace(placement=SimpleNamespace(pass_bytes=streamed_bytes[tree.num_nodes]))

    return placed


@pytest.mark.parametrize(
    ("streamed_bytes", "slack", "expected"),
    [
        ({16: 0, 64: 0, 256: 0}, 0.03, 256),
        ({16: 0, 64: 0, 256: 1}, 0.03, 64),  # a layer would leave
        ({16: 100, 64: 100, 256: 103}, 0.03, 256),  # most layers stream anyway
        ({16: 100, 64: 100, 256: 104}, 0.03, 64),
        ({16: 100, 64: 100, 256: 101}, 0.0, 64),
        ({16: 100, 64: 100}, 0.03, 64),
        ({16: 100}, 0.03, 16),
    ],
)
def test_the_largest_trees_that_push_no_layers_out(streamed_bytes: dict[int, int], slack: float, expected: int) -> None:
    tree, weights = largest_tree_that_fits(TreeSettings(size=64), place(streamed_bytes), slack=slack, num_texts=1)
    assert tree == TreeSettings(size=expected)
    assert weights.placement.pass_bytes == streamed_bytes[expected]


def test_larger_trees_than_are_tried_are_kept() -> None:
    tree, _ = largest_tree_that_fits(TreeSettings(size=500), place({500: 9, 256: 0}), slack=0.0, num_texts=1)
    assert tree.size == 500


def test_where_no_trees_fit_the_first_ones_are_named() -> None:
    with pytest.raises(EdgespecError, match="64 nodes do not fit"):
        largest_tree_that_fits(TreeSettings(size=64), place({}), slack=0.0, num_texts=1)


def test_chains_have_room_for_longer_ones_and_other_shapes_are_as_they_are() -> None:
    anything = place(dict.fromkeys(range(1000), 0))
    chain, _ = largest_tree_that_fits(TreeSettings(policy="chain"), anything, slack=0.0, num_texts=1)
    assert chain.draft_tokens == 16
    mcsd = TreeSettings(policy="mcsd")
    assert largest_tree_that_fits(mcsd, anything, slack=0.0, num_texts=1)[0] == mcsd
