"""Trials of trees far larger than those in use, where passes would hardly take longer.

Sizes are looked for among neighbours. Where the first rows of a pass are the dear ones, as those of a mixture with few
large experts are, small trees cost much and large ones little more: no neighbour says so, and a trial does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edgespec.tuning.tokens_by_size import MeanTree, TokensBySize

FLAT = 1.25  # times as long as the largest neighbour, and still worth a trial
NEAREST, FARTHEST = 2, 8  # times its nodes
TREES = 3  # of a trial


class FarTrial:
    """A trial that is under way, or none: its size, and what its trees yielded."""

    def __init__(self) -> None:
        self.size: int | None = None
        self._grown: list[tuple[Sequence[float], Sequence[int], int]] = []

    def begin(self, sizes: Sequence[int], near: int, step_s: Callable[[int], float]) -> None:
        """Try the largest of the sizes that takes little longer than `near` does; none may."""
        most_s = FLAT * step_s(near)
        far = [size for size in sizes if NEAREST * near <= size <= FARTHEST * near and step_s(size) <= most_s]
        self.size = max(far, default=None)
        self._grown = []

    def learn(self, expected: Sequence[float], layers: Sequence[int], num_trees: int) -> None:
        """Note so many trees of the trial: each node's expected tokens and layer, best score first."""
        self._grown.append((expected, layers, num_trees))

    @property
    def is_done(self) -> bool:
        """Return whether it has had all its trees."""
        return self._num_trees >= TREES

    def found(self, sizes: Sequence[int]) -> tuple[TokensBySize, MeanTree] | None:
        """Return the yields of the trial's trees alone, and the one of its size; None before the first tree."""
        if self.size is None or not self._num_trees:
            return None
        found = TokensBySize(sizes)
        for expected, layers, count in self._grown:
            found.learn(expected, layers, self.size, count)
        return found, found.all()[found.sizes.index(self.size)]

    @property
    def _num_trees(self) -> int:
        return sum(count for _, _, count in self._grown)
