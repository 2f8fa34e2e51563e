"""What a DFlash2 drafter has beside a DFlash drafter's: convolutions within the block, and a selector of candidates.

A convolution mixes a row of the block with the one before it, by a kernel that is partly made of the row. The selector
takes the likeliest tokens of a place, and scores each of them by the token chosen before it. Legend: h the drafter's
width, r the rank, V the target's tokens, c candidates, k rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from edgespec.draft.published import PublishedDraft

SELECTOR_TENSORS = re.compile(
    r"candidate_selector\.(hidden_projection|predecessor_codebook|successor_codebook)(?:\.weight)?"
)
SELECTOR_KEYS = {"conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectorFacts:
    """What a drafter's config says of both."""

    num_taps: int  # rows that a convolution mixes
    group_size: int  # channels that share what a kernel is made of
    rank: int
    num_candidates: int  # of a place


def read_selector(stated: Mapping[str, Any], drafter: PublishedDraft, *, hidden_size: int) -> SelectorFacts:
    """Return what a config says of both; raises EdgespecError for sizes that are none."""
    facts = SelectorFacts(
        num_taps=drafter.count(stated, "conv_kernel_size", default=2),
        group_size=drafter.count(stated, "conv_group_size", default=16),
        rank=drafter.count(stated, "selector_rank"),
        num_candidates=drafter.count(stated, "selector_top_k", default=16),
    )
    if hidden_size % facts.group_size:
        raise drafter.wrong(f"states conv_group_size = {facts.group_size}, which does not divide {hidden_size}")
    return facts


class BlockConvolution(nn.Module):
    """Mixes a block's rows before and after a part of a layer, by kernels of one projection."""

    def __init__(self, facts: SelectorFacts, *, hidden_size: int, block_size: int) -> None:
        super().__init__()
        self.num_taps, self.group_size, self.block_size = facts.num_taps, facts.group_size, block_size
        self.base_kernel = nn.Parameter(torch.empty(2, facts.num_taps, hidden_size))
        num_groups = hidden_size // facts.group_size
        self.kernel_projection = nn.Linear(hidden_size, 2 * facts.num_taps * num_groups, bias=False)

    def kernels(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        """Return the kernels [k, taps, h] before and after the part, of its normed input [1, k, h]."""
        own = self.kernel_projection(normed[0]).unflatten(-1, (2, self.num_taps, -1))
        before, after = (self.base_kernel + own.repeat_interleave(self.group_size, -1)).unbind(1)
        return before, after

    def forward(self, kernels: Tensor, rows: Tensor) -> Tensor:
        """Return the rows [1, k, h] of whole blocks, each mixed with those before it in its own block."""
        blocks = rows.view(-1, self.block_size, rows.shape[-1])
        kernels = kernels.view(-1, self.block_size, *kernels.shape[1:])
        found = kernels[:, :, 0] * blocks
        for tap in range(1, self.num_taps):
            found[:, tap:] += kernels[:, tap:, tap] * blocks[:, :-tap]
        return found.view(rows.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceCandidates:
    """The likeliest tokens of some places, and what their scores are made of."""

    tokens: Tensor  # [s, c]
    unary: Tensor  # [s, c], their logits before they are scored
    keys: Tensor  # [s, c, r], of which the product with the vector of the token before is added
    others: Tensor  # [s, V], or [1, V] of all places: the logits of tokens that are no candidates, -inf where none is
    log_shares: Tensor | None  # [s, 1], what candidates have together, beside the others' logits; None: all


class CandidateSelector(nn.Module):
    """Scores the candidates of a place by the token before it."""

    def __init__(self, facts: SelectorFacts, *, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.num_candidates = min(facts.num_candidates, vocab_size)
        self.hidden_projection = nn.Linear(hidden_size, facts.rank, bias=False)
        self.predecessor_codebook = nn.Embedding(vocab_size, facts.rank)
        self.successor_codebook = nn.Embedding(vocab_size, facts.rank)

    def forward(self, logits: Tensor, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Return logits [k, V] behind tokens [k], of those of their places [k, V] and their hidden states [k, h].

        Other tokens than a place's candidates have none.
        """
        return self.scored(self.candidates(logits, hidden), torch.arange(tokens.shape[0], device=tokens.device), tokens)

    def candidates(self, logits: Tensor, hidden: Tensor, *, keeps_others: bool = False) -> PlaceCandidates:
        """Return the candidates of places of logits [s, V] and hidden states [s, h].

        If it `keeps_others`, candidates have together the probability that the place gives them, and others their own.
        """
        unary, tokens = logits.topk(self.num_candidates)
        weights = self.hidden_projection(hidden).float()
        keys = self.successor_codebook(tokens).float() * weights[:, None]
        return PlaceCandidates(
            tokens=tokens,
            unary=unary,
            keys=keys,
            others=logits if keeps_others else torch.full_like(logits[:1], -torch.inf),
            log_shares=unary.float().logsumexp(-1, keepdim=True) if keeps_others else None,
        )

    def scored(self, candidates: PlaceCandidates, places: Tensor, tokens: Tensor) -> Tensor:
        """Return logits [k, V] behind tokens [k], which stand before places [k]."""
        before = self.predecessor_codebook(tokens).float()
        scores = candidates.unary[places] + (candidates.keys[places] * before[:, None]).sum(-1)
        others = candidates.others
        if candidates.log_shares is None:
            rows = others.expand(tokens.shape[0], -1)
        else:
            scores = scores.log_softmax(-1) + candidates.log_shares[places]
            rows = others[places]
        return rows.scatter(-1, candidates.tokens[places], scores.to(others.dtype))
