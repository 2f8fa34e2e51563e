"""What the best nodes of a text's trees yield: one verified tree scores every smaller size, because they are nested."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

REMEMBERED = 24.0  # trees of the running means
FALLING = 0.8  # gain of the next larger size over that of the last known one, until it is known


@dataclass(frozen=True, slots=True)
class MeanTree:
    """The mean of trees of at most this number of nodes."""

    tokens: float  # expected, the one that every pass yields included
    nodes: float
    layers: float


class TokensBySize:
    """Running means for trees of at most `sizes` nodes, ascending: what each size adds to the one before it."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self.num_trees = 0
        self._weights = [0.0] * len(self.sizes)
        self._gains: list[tuple[float, float, float]] = [(0.0, 0.0, 0.0)] * len(self.sizes)  # tokens, nodes, layers
        self.share_full = 1.0  # of the trees as large as they might be
        self._all: list[MeanTree] = []  # until another tree is known; none: to be summed up

    def seen(self) -> list[tuple[int, MeanTree, float]]:
        """Return the sizes that trees have had, ascending, with their yield and the trees that it is the mean of."""
        found = zip(self.sizes, self.all(), self._weights, strict=True)
        return [(size, tree, weight) for size, tree, weight in found if weight > 0]

    def recall(self, seen: Sequence[tuple[int, MeanTree, float]]) -> None:
        """Take over the means of these sizes, ascending, with lines between them."""
        points = [(0, MeanTree(1.0, 0.0, 0.0), 0.0), *seen]
        before = points[0][1]
        for index, size in enumerate(self.sizes):
            if size > points[-1][0]:
                break
            left, right = next(pair for pair in pairwise(points) if size <= pair[1][0])
            tree = _between(left[1], right[1], (size - left[0]) / (right[0] - left[0]))
            self._gains[index] = (tree.tokens - before.tokens, tree.nodes - before.nodes, tree.layers - before.layers)
            self._weights[index] = right[2]
            before = tree
        self._all = []

    def learn(self, expected: Sequence[float], layers: Sequence[int], limit: int, num_trees: int = 1) -> None:
        """Note each node's expected tokens and layer, best score first, of a tree that might have had `limit` nodes.

        They may be those of several trees that might have had as many each on average; the layers of the deepest count.
        """
        self._all = []
        self.num_trees += num_trees
        is_full = float(len(expected) >= num_trees * limit)
        self.share_full += (is_full - self.share_full) * min(1.0, num_trees / min(self.num_trees, REMEMBERED))
        tokens, deepest, taken = 0.0, 0, 0
        for index, size in enumerate(self.sizes):
            if size > limit:
                break
            before = (tokens, taken, deepest)
            while taken < min(num_trees * size, len(expected)):
                tokens += expected[taken]
                deepest = max(deepest, layers[taken])
                taken += 1
            self._weights[index] = min(self._weights[index] + num_trees, REMEMBERED)
            share = min(1.0, num_trees / self._weights[index])
            added = (
                (tokens - before[0]) / num_trees,
                (taken - before[1]) / num_trees,
                float(deepest - before[2]),
            )
            means = self._gains[index]
            self._gains[index] = (
                means[0] + (added[0] - means[0]) * share,
                means[1] + (added[1] - means[1]) * share,
                means[2] + (added[2] - means[2]) * share,
            )

    def forget(self, share: float) -> None:
        """Lower the weight of the past against the future."""
        self._weights = [weight * (1 - share) for weight in self._weights]
        self._all = []

    def all(self) -> Sequence[MeanTree]:
        """Return the yield of every size; sizes that no tree has had yet go on as the others do, ever less."""
        self._all = self._all or self._summed()
        return self._all

    def _summed(self) -> list[MeanTree]:
        found: list[MeanTree] = []
        tokens, nodes, layers = 1.0, 0.0, 0.0
        last = (0.5, 1.0, 1.0)
        for index, size in enumerate(self.sizes):
            if self._weights[index] > 0:
                last = self._gains[index]
            else:
                more = self.share_full * (size - (self.sizes[index - 1] if index else 0))
                last = (last[0] * FALLING * self.share_full, more, self.share_full * min(1.0, last[2]))
            tokens, nodes, layers = tokens + last[0], nodes + last[1], layers + last[2]
            found.append(MeanTree(tokens, nodes, max(1.0, layers)))
        return found


def _between(left: MeanTree, right: MeanTree, share: float) -> MeanTree:
    return MeanTree(
        left.tokens + share * (right.tokens - left.tokens),
        left.nodes + share * (right.nodes - left.nodes),
        left.layers + share * (right.layers - left.layers),
    )
