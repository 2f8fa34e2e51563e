"""Published drafts beside the built-in draft at equal cost: its best tree that is no larger and no dearer to grow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

NODES = (1, 2, 4, 8, 16, 32, 64)  # of the built-in draft's trees that are tried
DEPTHS = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grown:
    """What trees of one size and depth bring, and take to grow."""

    nodes: int
    depth: int
    tokens: float  # a pass
    grow_ms: float


def best_within(limit: Grown, trees: Sequence[Grown]) -> Grown | None:
    """The tree of most tokens that has no more nodes and takes no longer to grow; None where there is none."""
    within = (tree for tree in trees if tree.nodes <= limit.nodes and tree.grow_ms <= limit.grow_ms)
    return max(within, key=lambda tree: tree.tokens, default=None)


def equal_cost_table(
    found: Mapping[str, Mapping[str, Grown]],
    built_in: Mapping[float, Sequence[Grown]],
    temperatures: Mapping[str, float],
) -> list[list[str]]:
    """A row a draft: its tokens a pass in each cell, and those of the built-in draft's best tree of no more cost.

    `found` has a draft's trees by cell, `built_in` the built-in draft's by temperature.
    """
    table = [["a draft's tokens a pass : the built-in draft's at its cost", *temperatures]]
    for name, cells in found.items():
        row = [name]
        for cell, temperature in temperatures.items():
            tree = cells[cell]
            own = f"{tree.tokens:.2f} ({tree.grow_ms:.1f} ms)"
            other = best_within(tree, built_in[temperature])
            row.append(f"{own} : {_in_words(other) if other else 'none is as cheap'}")
        table.append(row)
    return table


def _in_words(tree: Grown) -> str:
    nodes = "1 node" if tree.nodes == 1 else f"{tree.nodes} nodes"
    return f"{tree.tokens:.2f} ({nodes}, depth {tree.depth}, {tree.grow_ms:.1f} ms)"
