"""Trees while they grow: layers of nodes, and the distributions of the nodes that were expanded.

The engines of growth decide which nodes are added and expanded; this module records them. The nodes of several texts'
trees lie in one row of tensors, with the number of their texts, so that a layer of all trees is a few operations.
Legend: t texts; k nodes expanded together, which gave q [k, vocab]; j nodes added below them. Within a layer the nodes
of a text lie together, in the order of the texts.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from edgespec.draft.distributions import Distributions, whole
from edgespec.grow.children import under_noise
from edgespec.grow.selection import count_texts
from edgespec.sampling.distribution import CHUNK_ELEMENTS
from edgespec.to_device import on_device
from edgespec.tree.policies import Draw
from edgespec.tree.token_tree import TokenTree

# Tokens [k] to expand, and their parents' rows [k] in the text's drafter
DraftRequest: TypeAlias = tuple[Tensor, Tensor]
Expanding = Generator[DraftRequest, Distributions, None]  # yields requests as `Growth` does
# The growth of one text's tree: it requests q [k, vocab] of some nodes again and again
GrowthAlone: TypeAlias = Generator[DraftRequest, Distributions, TokenTree]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """The children that were drawn below k nodes, c each, and what they were drawn from."""

    draft_q: Tensor  # [k, vocab], what the draft says
    noise: Tensor | None  # [vocab], e^g of the children's position, where they are the best under it
    drawn: Tensor  # [k, c], their tokens
    q_drawn: Tensor  # [k, c], their q, or q' under the noise; 0 where a row had no more tokens

    @property
    def q(self) -> Tensor:
        """Return what the children are the best of, or were drawn from: [k, vocab]."""
        return self.draft_q if self.noise is None else under_noise(self.draft_q, self.noise)

    @property
    def mass_left(self) -> Tensor:
        """Return the draft mass before each draw: [k, c]. It takes a pass over q, for the policies that use it."""
        return mass_left(self.draft_q, self.drawn, self.q_drawn)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer(Drawn):
    """The children that were drawn below k nodes of one text, and their features."""

    depth: int  # of the children: 1 is below the root
    values: Tensor  # [k], V of their parents: the chance that verification accepts them
    path_probability: Tensor  # [k], the product of q along the way to their parents
    rows: Tensor  # [k], of the drafter, for what else it knows


class GrowingTrees:
    """The nodes of all texts' trees in the order in which they came, layer by layer: first the roots."""

    def __init__(self, roots: Sequence[int], *, device: torch.device, keeps_draft_probs: bool) -> None:
        """Begin with a root for each text; `keeps_draft_probs` keeps q for the rule or for records."""
        self._device, self._keeps_draft_probs, self._num_texts = device, keeps_draft_probs, len(roots)
        every = torch.arange(self._num_texts, device=device)
        # One entry a layer of the trees; node numbers count through all layers and texts.
        self._tokens = [on_device(roots, device)]
        self._parents = [torch.full_like(every, -1)]
        self._ranks = [torch.zeros_like(every)]
        self._draft_rows = [torch.full_like(every, -1)]
        self._texts = [every]
        self._q: list[list[Tensor]] = [[] for _ in roots]  # of each text, where all are kept
        self._expanded = every[:0]  # node numbers of those expanded last: [k]
        self.texts = every[:0]  # their texts: [k]
        self.rows = every[:0]  # and their rows of the text's drafter: [k]
        self._parent_rows = self._parents[0]  # rows of the last layer's parents
        self._num_rows = torch.zeros_like(every)  # of each text's drafter: [t]
        self._num_before_last, self._num_nodes = 0, self._num_texts

    @property
    def parents(self) -> Tensor:
        """The parents of all nodes so far: [n], -1 for roots."""
        return torch.cat(self._parents)

    def add(self, row: Tensor, rank: Tensor, tokens: Tensor) -> None:
        """Add a layer of children [j]: the row of `q` that each comes from, its place among its siblings, its token."""
        self._tokens.append(tokens)
        self._parents.append(self._expanded[row])
        self._ranks.append(rank)
        self._draft_rows.append(torch.full_like(row, -1))
        self._texts.append(self.texts[row])
        self._parent_rows = self.rows[row]
        self._num_before_last = self._num_nodes
        self._num_nodes += row.shape[0]

    def ask(self, which: Tensor | None = None) -> dict[int, DraftRequest]:
        """Return the request to each text's drafter: nodes `which` [k] of the layer added last, ascending, or all.

        Texts without such nodes are left out. The answers go to `keep`.
        """
        if which is None:
            which = torch.arange(self._tokens[-1].shape[0], device=self._device)
        tokens, texts = self._tokens[-1][which], self._texts[-1][which]
        counts, widths = self._count(texts)
        offsets = self._num_rows - (counts.cumsum(0) - counts)  # [t], from a node's place to its row
        self.rows = torch.arange(which.shape[0], device=self._device) + offsets[texts]
        self._num_rows = self._num_rows + counts
        self._draft_rows[-1][which] = self.rows
        self._expanded, self.texts = self._num_before_last + which, texts
        parts = zip(tokens.split(widths), self._parent_rows[which].split(widths), strict=True)
        return {text: request for text, request in enumerate(parts) if widths[text]}

    def keep(self, found: Mapping[int, Distributions]) -> None:
        """Keep q of the requested nodes, where verification needs it."""
        if self._keeps_draft_probs:
            for text, q in found.items():
                self._q[text].append(whole(q))

    def all_finished(
        self, draw: Draw, chosen: Tensor, *, ancestors: Tensor | None = None, scores: Tensor | None = None
    ) -> list[TokenTree]:
        """Return each text's tree of the nodes `chosen` [n] in ascending order.

        The roots must be among them, and the parents of all. `scores` are those of all nodes.
        """
        texts = torch.cat(self._texts)[chosen]
        if self._num_texts > 1:
            order = texts.argsort(stable=True)
            chosen, texts = chosen[order], texts[order]
        counts, widths = self._count(texts)
        parents = self.parents
        new_number = torch.full_like(parents, -1)
        new_number[chosen] = torch.arange(chosen.shape[0], device=self._device) - (counts.cumsum(0) - counts)[texts]
        node_parents = parents[chosen]
        columns = (
            torch.cat(self._tokens)[chosen],
            torch.where(node_parents >= 0, new_number[node_parents.clamp(min=0)], -1),
            torch.cat(self._ranks)[chosen],
            torch.cat(self._draft_rows)[chosen],
        )
        of_texts = zip(*(column.split(widths) for column in columns), strict=True)
        scores_of = [None] * self._num_texts if scores is None else scores[chosen].split(widths)
        return [
            TokenTree(
                tokens=tokens,
                parents=parents,
                ranks=ranks,
                draw=draw,
                draft_rows=draft_rows,
                draft_probs=torch.cat(self._q[text]) if self._keeps_draft_probs else None,
                ancestors=ancestors,
                scores=scores_of[text],
            )
            for text, (tokens, parents, ranks, draft_rows) in enumerate(of_texts)
        ]

    def _count(self, texts: Tensor) -> tuple[Tensor, list[int]]:
        """Return how many of `texts` [k] each text is: [t], and on the host, which waits unless there is one text."""
        if self._num_texts == 1:
            return self._num_rows.new_full((1,), texts.shape[0]), [texts.shape[0]]
        counts = count_texts(texts, self._num_texts)
        return counts, counts.tolist()


class GrowingTree(GrowingTrees):
    """The nodes of a single text's tree."""

    def __init__(self, root: int, *, device: torch.device, keeps_draft_probs: bool) -> None:
        """Begin with a root; `keeps_draft_probs` keeps the draft's distributions for the rule or for records."""
        super().__init__([root], device=device, keeps_draft_probs=keeps_draft_probs)
        self._last: list[Distributions] = []  # of the nodes expanded last

    @property
    def distributions(self) -> Distributions:
        """The distributions of the nodes expanded last, which may be made only as they are looked at."""
        return self._last[0]

    @property
    def q(self) -> Tensor:
        """The distributions of the nodes expanded last: [k, vocab], all of them."""
        return whole(self.distributions)

    def expand(self, which: Tensor | None = None) -> Expanding:
        """Request the draft's q after nodes `which` [k] of the layer added last, or all: at first the root."""
        (request,) = self.ask(which).values()
        self._last.clear()  # before the next one is made: both at once would be the peak
        q = yield request
        self._last.append(whole(q) if self._keeps_draft_probs else q)
        self.keep({0: self._last[0]})

    def finished(
        self, draw: Draw, chosen: Tensor | None = None, *, ancestors: Tensor | None = None, scores: Tensor | None = None
    ) -> TokenTree:
        """Return the tree of the nodes `chosen` [n] in ascending order; None keeps all.

        The parents of those nodes must be among them. `ancestors` is the mask of the finished tree where it is known
        beforehand, `scores` are the scores of all nodes.
        """
        if chosen is None:
            chosen = torch.arange(self._num_nodes, device=self._device)
        (tree,) = self.all_finished(draw, chosen, ancestors=ancestors, scores=scores)
        return tree


def mass_left(q: Tensor, drawn: Tensor, q_drawn: Tensor) -> Tensor:
    """Return the draft mass before each draw, [k, c], for tokens `drawn` [k, c] of q [k, vocab].

    `q_drawn` [k, c] is the tokens' q, 0 where a row has no more. The mass is a sum over the rest, never one minus
    the mass drawn: that difference is rounding error where q is nearly one-hot.
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
