"""A tree while it grows: layers of nodes, and the distributions of the nodes that were expanded.

The engines of growth decide what is added and what is expanded; this keeps the books. They are generators, which ask
for q and are sent it, so that the trees of many texts can grow with one draft call a layer. Legend: k nodes
expanded together, which gave q [k, vocab]; j nodes added below them.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from edgespec.draft.distributions import Distributions, whole
from edgespec.grow.children import under_noise
from edgespec.sampling.distribution import CHUNK_ELEMENTS
from edgespec.tree.policies import Draw
from edgespec.tree.token_tree import TokenTree

Expanding = Generator[tuple[Tensor, Tensor], Distributions, None]  # asks as `Growth` does


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The children that were drawn below k nodes, c each, and what is known of them."""

    depth: int  # of the children: 1 is below the root
    draft_q: Tensor  # [k, vocab], what the draft says
    noise: Tensor | None  # [vocab], e^g of the children's position, where they are the best under it
    drawn: Tensor  # [k, c], their tokens
    q_drawn: Tensor  # [k, c], their q, or q' under the noise; 0 where a row had no more tokens
    values: Tensor  # [k], V of their parents: the chance that verification accepts them
    path_probability: Tensor  # [k], the product of q along the way to their parents
    rows: Tensor  # [k], of the drafter, for what else it knows

    @property
    def q(self) -> Tensor:
        """Return what the children are the best of, or were drawn from: [k, vocab]."""
        return self.draft_q if self.noise is None else under_noise(self.draft_q, self.noise)

    @property
    def mass_left(self) -> Tensor:
        """Return the draft mass before each draw: [k, c]. It takes a pass over q, for the policies that ask for it."""
        return mass_left(self.draft_q, self.drawn, self.q_drawn)


class GrowingTree:
    """The nodes in the order in which they came, layer by layer; the root is expanded at once."""

    def __init__(self, root: int, *, device: torch.device, keeps_q: bool) -> None:
        """Begin with a root; `keeps_q` keeps the draft's distributions for the rule or for records."""
        self._device = device
        self._keeps_q = keeps_q
        # One entry a layer of the tree; node numbers count through all layers.
        self._tokens = [torch.tensor([root], device=device)]
        self._parents = [torch.tensor([-1], device=device)]
        self._ranks = [torch.zeros(1, dtype=torch.long, device=device)]
        self._draft_rows = [torch.zeros(1, dtype=torch.long, device=device)]
        self._q: list[Distributions] = []  # the last one alone, unless all are kept, whole
        self._expanded = torch.zeros(1, dtype=torch.long, device=device)  # node numbers, [k]
        self._parent_rows = self._draft_rows[0]  # rows of the last layer's parents
        self.rows = self._draft_rows[0]  # rows of the nodes expanded last, [k]
        self._num_before_last, self._num_nodes, self._num_rows = 0, 1, 1

    @property
    def parents(self) -> Tensor:
        """The parents of all nodes so far: [n], -1 for the root alone."""
        return torch.cat(self._parents)

    @property
    def distributions(self) -> Distributions:
        """The distributions of the nodes expanded last, which may be made only as they are looked at."""
        return self._q[-1]

    @property
    def q(self) -> Tensor:
        """The distributions of the nodes expanded last: [k, vocab], all of them."""
        return whole(self._q[-1])

    def add(self, row: Tensor, rank: Tensor, tokens: Tensor) -> None:
        """Add a layer of children [j]: the row of `q` that each comes from, its place among its siblings, its token."""
        self._tokens.append(tokens)
        self._parents.append(self._expanded[row])
        self._ranks.append(rank)
        self._draft_rows.append(torch.full_like(row, -1))
        self._parent_rows = self.rows[row]
        self._num_before_last = self._num_nodes
        self._num_nodes += row.shape[0]

    def expand_root(self) -> Expanding:
        """Ask the draft what follows the root."""
        self._take((yield self._tokens[0], self._parents[0]))

    def expand(self, which: Tensor) -> Expanding:
        """Ask the draft what follows nodes `which` [k] of the layer added last."""
        first_row, count = self._num_rows, which.shape[0]
        if not self._keeps_q:
            self._q.clear()  # before the next one is made: both at once would be the peak
        self._take((yield self._tokens[-1][which], self._parent_rows[which]))
        self.rows = torch.arange(first_row, first_row + count, device=self._device)
        self._draft_rows[-1][which] = self.rows
        self._expanded = self._num_before_last + which
        self._num_rows += count

    def _take(self, q: Distributions) -> None:
        self._q.append(whole(q) if self._keeps_q else q)

    def finished(
        self,
        draw: Draw,
        kept: Tensor | None = None,
        *,
        ancestors: Tensor | None = None,
        scores: Tensor | None = None,
    ) -> TokenTree:
        """Return the tree of the nodes `kept` [n] in ascending order; None keeps all.

        The parents of kept nodes must be among them. `ancestors` is the mask of the finished tree where it is known
        beforehand, `scores` are the scores of all nodes.
        """
        parents = self.parents
        if kept is None:
            kept = torch.arange(self._num_nodes, device=self._device)
        new_number = torch.full_like(parents, -1)
        new_number[kept] = torch.arange(kept.shape[0], device=self._device)
        kept_parents = parents[kept]
        return TokenTree(
            tokens=torch.cat(self._tokens)[kept],
            parents=torch.where(kept_parents >= 0, new_number[kept_parents.clamp(min=0)], -1),
            ranks=torch.cat(self._ranks)[kept],
            draw=draw,
            draft_rows=torch.cat(self._draft_rows)[kept],
            draft_probs=torch.cat([whole(q) for q in self._q]) if self._keeps_q else None,
            ancestors=ancestors,
            scores=None if scores is None else scores[kept],
        )


def mass_left(q: Tensor, drawn: Tensor, q_drawn: Tensor) -> Tensor:
    """Return the draft mass before each draw, [k, c], for tokens `drawn` [k, c] of q [k, vocab].

    `q_drawn` [k, c] is the tokens' q, 0 where a row has no more. The mass is a sum of what is left, never one minus
    what is gone: that difference is rounding error where q is nearly one-hot.
    """
    drawn = torch.where(q_drawn > 0, drawn, drawn[:, :1])
    rows = max(1, CHUNK_ELEMENTS // q.shape[1])
    never_drawn = [
        some.scatter(1, tokens, 0.0).sum(1, keepdim=True, dtype=torch.float64)
        for some, tokens in zip(q.split(rows), drawn.split(rows), strict=True)
    ]
    from_here = q_drawn.double().flip(1).cumsum(1).flip(1)
    # Where a row has run out, 0 is nothing to divide by.
    return (torch.cat(never_drawn) + from_here).to(q.dtype).clamp_(min=torch.finfo(q.dtype).tiny)


def best_nodes(values: Tensor, count: int) -> Tensor:
    """Return the numbers of the `count` nodes of largest value [n], ascending.

    The order is stable: where a child's value equals its parent's, the parent, which stands first, is kept first.
    """
    return values.argsort(descending=True, stable=True)[:count].sort().values
