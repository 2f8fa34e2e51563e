"""The best nodes of all trees that grow together: of each text at most as many as it may have, and a budget of all.

Scores never grow from a node to its child, and nodes come layer by layer; ties go to those that came first. So what is
selected are trees: the parents of a selected node are selected. Rivals are nodes from elsewhere that take places too.
Legend: t texts, r rivals, m nodes below the roots so far.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from edgespec.to_device import on_device


class Selection:
    """The nodes so far, and which of them would be selected."""

    def __init__(
        self, sizes: Sequence[int], budget: int, *, like: Tensor, rivals: tuple[Tensor, Tensor] | None = None
    ) -> None:
        """Select at most `sizes` [t] nodes of each text, and `budget` of all; scores are tensors `like` this one.

        `rivals` are scores [r] and texts [r].
        """
        self._budget, self._is_common = budget, min(sizes) >= budget
        self._sizes = on_device(sizes, like.device)
        # First the rivals, then the nodes: [r + m]
        self._scores, self._texts = (like.new_empty(0), self._sizes[:0]) if rivals is None else rivals
        self._num_rivals = self._scores.shape[0]
        self._nothing = like.new_zeros(len(sizes))
        self._sums = self._nothing  # of each text's own best scores: [t]
        self._sum = like.new_zeros(())  # of the best of all
        self.least = self._nothing  # only higher scores may still be selected, of each text: [t]
        if self._num_rivals:
            self.add(self._scores[:0], self._texts[:0])
            self.gains()  # from here on: rivals are no gain

    def withdraw(self, rivals: Tensor) -> None:
        """Let rivals [k], by number, take no places any more: a node has the same token below the same parent.

        Numbers beyond the rivals are none.
        """
        is_left = torch.ones(self._num_rivals + 1, dtype=torch.bool, device=self._scores.device)
        is_left[rivals.clamp(max=self._num_rivals)] = False
        of_rivals = torch.where(is_left[:-1], self._scores[: self._num_rivals], 0)
        self._scores = torch.cat([of_rivals, self._scores[self._num_rivals :]])

    def add(self, scores: Tensor, texts: Tensor) -> None:
        """Add a layer of nodes [j]; a score of 0 is never selected."""
        self._scores, self._texts = torch.cat([self._scores, scores]), torch.cat([self._texts, texts])
        own = self._scores
        if not self._is_common:
            rank, sizes = self._rank(), self._sizes[self._texts]
            own = torch.where(rank < sizes, own, 0)
            last = torch.where(rank == sizes - 1, own, 0)
            self.least = self._nothing.index_add(0, self._texts, last)
        if own.shape[0] >= self._budget:
            self.least = self.least.clamp(min=own.topk(self._budget).values[-1])

    def gains(self) -> Tensor:
        """Return the growth of the sum of each text's own best scores since the last call: [t]."""
        sums_before, self._sums = self._sums, self._nothing.index_add(0, self._texts, self._own())
        return self._sums - sums_before

    def gain_of_all(self) -> Tensor:
        """Return the growth of the sum of the selected nodes' scores since the last call: []."""
        scores, sum_before = self._in_question(), self._sum
        self._sum = scores.topk(min(self._budget, scores.shape[0])).values.sum()
        return self._sum - sum_before

    @property
    def scores(self) -> Tensor:
        """The scores of the roots, which are the largest, and then of all nodes: [t + m]."""
        return torch.cat([torch.full_like(self._nothing, torch.inf), self._scores[self._num_rivals :]])

    def selected(self) -> Tensor:
        """Return the numbers of all roots and of the selected nodes, ascending; roots are counted too."""
        own = self._in_question()
        is_selected = torch.zeros_like(own, dtype=torch.bool)
        is_selected[own.argsort(descending=True, stable=True)[: self._budget]] = True
        is_selected = (is_selected & (own > 0))[self._num_rivals :]
        (kept,) = torch.cat([torch.ones_like(self._nothing, dtype=torch.bool), is_selected]).nonzero(as_tuple=True)
        return kept

    def _in_question(self) -> Tensor:
        """Return the scores whose best are selected: [r + m]."""
        return self._scores if self._is_common else self._own()

    def _own(self) -> Tensor:
        """Return the scores of the nodes that are among their text's best, and 0 of the others: [r + m]."""
        return torch.where(self._rank() < self._sizes[self._texts], self._scores, 0)

    def _rank(self) -> Tensor:
        return rank_within(self._scores, self._texts, self._sizes.shape[0])


def count_texts(texts: Tensor, num_texts: int) -> Tensor:
    """Return how many of `texts` [m] each text is: [t]. `bincount` waits for a device, whose largest it needs."""
    return texts.new_zeros(num_texts).index_add_(0, texts, torch.ones_like(texts))


def rank_within(scores: Tensor, texts: Tensor, num_texts: int) -> Tensor:
    """Return the place of each score among those of its text [m], from 0 on: the largest first, ties as they stand."""
    order = scores.argsort(descending=True, stable=True)
    places = torch.arange(order.shape[0], device=order.device)
    if num_texts > 1:
        order = order[texts[order].argsort(stable=True)]
        counts = count_texts(texts, num_texts)
        places = places - (counts.cumsum(0) - counts)[texts[order]]
    return torch.empty_like(order).scatter_(0, order, places)
