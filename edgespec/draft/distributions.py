"""The draft's q of a layer's nodes, which is made chunk by chunk where all of it would be large.

A layer of 768 nodes over a vocabulary of 128,000 tokens has 400 MB of q, and needs several times that while it is made.
Growth needs a few candidates a node, so it makes one chunk of rows, reads it, and frees it. Legend: k nodes, h hidden
size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from edgespec.model.row_chunks import row_chunks, rows_at_once

WHOLE_CHUNKS = 2  # a layer of up to this size is made at once, for all texts: the head's weights are read once


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LazyDistributions:
    """q [k, vocab] of nodes whose hidden states [k, h] are known."""

    hidden: Tensor
    q_of: Callable[[Tensor], Tensor]  # hidden states [j, h] of a chunk -> q [j, vocab]
    vocab: int

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield rows and their q; each chunk is made when it is yielded."""
        for rows in row_chunks(self.hidden.shape[0], self.vocab):
            yield rows, self.q_of(self.hidden[rows])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedDistributions:
    """q of nodes that share a few rows."""

    q: Tensor  # [s, vocab]
    which: Tensor  # [k], each node's row


Distributions: TypeAlias = Tensor | LazyDistributions | SharedDistributions


def rows_made_at_once(vocab: int) -> int:
    """Return the most rows of q that are made at once; of more rows, one chunk exists at a time."""
    return WHOLE_CHUNKS * rows_at_once(vocab)


def whole(q: Distributions) -> Tensor:
    """Return all of q [k, vocab]."""
    if isinstance(q, SharedDistributions):
        return q.q[q.which]
    return q if isinstance(q, Tensor) else torch.cat([part for _, part in q.chunks()])


def look_at(
    q: Distributions, look: Callable[[Tensor, slice], tuple[Tensor, ...]], *, at_q_alone: bool = False
) -> tuple[Tensor, ...]:
    """Return the results of `look`, which gets chunks of q [j, vocab] and their rows, and gives a row for each node.

    With `at_q_alone` they depend on q only, and are made once for nodes that share it.
    """
    if isinstance(q, SharedDistributions) and at_q_alone:
        return tuple(found[q.which] for found in look(q.q, slice(0, q.q.shape[0])))
    q = whole(q) if isinstance(q, SharedDistributions) else q
    if isinstance(q, Tensor):
        return look(q, slice(0, q.shape[0]))
    found = [look(part, rows) for rows, part in q.chunks()]
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))
