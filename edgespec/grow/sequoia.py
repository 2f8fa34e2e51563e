"""Sequoia: the static tree with the largest expected number of tokens for measured acceptance by rank.

Source: Sequoia (Chen et al. 2024), section 4.1 (the dynamic programme) and 4.3 (the choice of size for
a machine). acceptance[k] is the chance that a node's child of rank k is the one accepted, given that
the node is; a tree yields 1 + the sum over its nodes of the product of acceptance along the path.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from edgespec.config import require
from edgespec.tree.shapes import TreeShape

ROUNDING = 1e-4  # that the sum of rates may be above 1: files keep five digits of each


NUM_RANKS = 32  # of acceptance by rank: beyond them a child adds less than a percent at any rate of use


@dataclass(frozen=True, slots=True, kw_only=True)
class SequoiaTable:
    """The best trees of every size and depth, for one vector of acceptance."""

    gains: Tensor  # [depth + 1, size + 1]: expected tokens below the root, by the most layers and nodes
    first: Tensor  # [depth + 1, ranks, size + 1]: nodes for the child of that rank and its subtree

    def expected_tokens(self, size: int, depth: int) -> float:
        """Return tokens a pass of the best tree of at most `size` nodes and `depth` layers below the root."""
        return 1 + float(self.gains[depth, size])

    def shape(self, size: int, depth: int) -> TreeShape:
        """Return the best tree; raises EdgespecError where none gains a token."""
        require(
            float(self.gains[depth, size]) > 0,
            f"by the acceptance by rank, no tree of {size} nodes and {depth} layers gains a token.",
            "Measure it again: edgespec train acceptance.",
        )
        parents = [-1]
        layer = [(0, size)]  # nodes, and how many nodes each has below it
        for below in range(depth, 0, -1):
            next_layer = []
            for node, left in layer:
                for rank in range(self.first.shape[1]):
                    taken = int(self.first[below, rank, left])
                    if taken == 0:
                        break
                    next_layer.append((len(parents), taken - 1))
                    parents.append(node)
                    left -= taken
            layer = next_layer
        return TreeShape(tuple(parents))


def power_law(rate: float) -> tuple[float, ...]:
    """Return acceptance by rank whose first entry is `rate`; its sum stays below 1."""
    require(0 < rate < 1, f"`acceptance={rate:g}` is not in (0, 1).", "Give the chance that a first child is accepted.")
    exponent = -math.log2(1 - rate)
    misses = [(rank + 1) ** -exponent for rank in range(NUM_RANKS + 1)]
    return tuple(misses[rank] - misses[rank + 1] for rank in range(NUM_RANKS))


def sequoia_table(acceptance: Sequence[float], *, size: int, depth: int, max_children: int) -> SequoiaTable:
    """Run the dynamic programme, which is exact for any acceptance that is nowhere negative.

    Raises EdgespecError for acceptance that is no distribution.
    """
    return _table(tuple(acceptance)[:max_children], size=size, depth=depth)


# An estimate has the same one for each draft that it weighs, and that of the largest trees takes half a second.
@functools.lru_cache(maxsize=16)
def _table(acceptance: tuple[float, ...], *, size: int, depth: int) -> SequoiaTable:
    rates = torch.tensor(acceptance, dtype=torch.float64)
    require(
        rates.numel() > 0 and bool((rates >= 0).all()) and float(rates.sum()) <= 1 + ROUNDING,
        f"acceptance by rank {[round(rate, 4) for rate in rates.tolist()]} is not in [0, 1] in all.",
        "Measure it again: edgespec train acceptance.",
    )
    num_ranks = rates.shape[0]
    gains = torch.zeros(depth + 1, size + 1, dtype=torch.float64)
    first = torch.zeros(depth + 1, num_ranks, size + 1, dtype=torch.long)
    for layers in range(1, depth + 1):
        siblings = torch.zeros(size + 1, dtype=torch.float64)  # best of the children of higher ranks, by nodes
        for rank in range(num_ranks - 1, -1, -1):
            # A child of m nodes, itself among them, gains its own acceptance times 1 + the gain of its subtree.
            # Of n nodes it leaves n - m to its siblings: row n of a sliding window, from m = size to 0.
            child = rates[rank] * (1 + gains[layers - 1, :size])
            left = functional.pad(siblings, (size, 0), value=-torch.inf).unfold(0, size + 1, 1)
            total = left[:, :size] + child.flip(0)
            best, index = total.max(1)
            # No child of this rank means none of a higher one.
            siblings = best.clamp(min=0)
            first[layers, rank] = torch.where(best > 0, size - index, 0)
        gains[layers] = siblings
        if torch.equal(gains[layers], gains[layers - 1]):  # deeper trees are no better
            gains[layers:], first[layers:] = gains[layers], first[layers]
            break
    return SequoiaTable(gains=gains, first=first)


def best_limits(table: SequoiaTable, seconds: Tensor) -> tuple[int, int]:
    """Return the size and depth of the tree of most expected tokens a second.

    `seconds` [depths, sizes] are those of steps with trees of one layer and one node, and so on. Where the paper has
    t(n) + d c in units of a pass, they may be of any clock.
    """
    num_depths, num_sizes = seconds.shape
    speeds = (1 + table.gains[1 : num_depths + 1, 1 : num_sizes + 1]) / seconds
    depth, size = divmod(int(speeds.argmax()), num_sizes)
    return size + 1, depth + 1


@functools.lru_cache(maxsize=16)
def best_shape(acceptance: tuple[float, ...], *, size: int, depth: int, max_children: int) -> TreeShape:
    """Return the best tree of at most `size` nodes and `depth` layers below the root."""
    return sequoia_table(acceptance, size=size, depth=depth, max_children=max_children).shape(size, depth)
