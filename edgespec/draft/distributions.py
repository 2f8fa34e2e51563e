"""The draft's q of a layer's nodes, which is made chunk by chunk where all of it would be large.

A layer of 768 nodes over a vocabulary of 128,000 tokens is 400 MB of q, and several times that while it is made. Growth
needs a handful of candidates a node, so it looks at one chunk of rows, and lets it go. Legend: k nodes, h hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from edgespec.model.row_chunks import row_chunks, rows_at_once

WHOLE_CHUNKS = 2  # a layer of so many is made at once, of all texts together: one look at the head's weights for all


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LazyDistributions:
    """q [k, vocab] of nodes whose hidden states [k, h] are known."""

    hidden: Tensor
    q_of: Callable[[Tensor], Tensor]  # hidden states [j, h] of a chunk -> q [j, vocab]
    vocab: int

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield rows and their q; a chunk is made when it is asked for."""
        for rows in row_chunks(self.hidden.shape[0], self.vocab):
            yield rows, self.q_of(self.hidden[rows])


Distributions: TypeAlias = Tensor | LazyDistributions


def rows_made_at_once(vocab: int) -> int:
    """Return how many rows of q are made together, one at least; of more, one chunk exists at a time."""
    return WHOLE_CHUNKS * rows_at_once(vocab)


def whole(q: Distributions) -> Tensor:
    """Return all of q [k, vocab]."""
    return q if isinstance(q, Tensor) else torch.cat([part for _, part in q.chunks()])


def look_at(q: Distributions, look: Callable[[Tensor, slice], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Return what `look` finds in q, given chunks [j, vocab] and their rows; it has a row for each node."""
    if isinstance(q, Tensor):
        return look(q, slice(0, q.shape[0]))
    found = [look(part, rows) for rows, part in q.chunks()]
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))
