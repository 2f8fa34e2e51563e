"""The head of a DSpark drafter: what the token before a place adds to the logits of the place.

A token has a short vector, and vectors make a bias of all tokens' logits. In the `vanilla` kind the bias depends on the
token alone; a `gated` one also on the place's hidden state, and an `rnn` one on all tokens of the block before it.
Legend: h the drafter's width, r the rank, V the target's tokens, Vd those that the drafter knows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from edgespec.draft.known_tokens_head import OutputFacts
from edgespec.draft.published import PublishedDraft

MARKOV_TENSORS = re.compile(
    r"(?:markov_head|logit_head)\.((?:markov_w1|markov_w2|gate_proj|joint_proj)\.(?:weight|bias))"
)
HeadKind = Literal["vanilla", "gated", "rnn"]
HEAD_KINDS: tuple[HeadKind, ...] = ("vanilla", "gated", "rnn")


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkovFacts:
    """What a drafter's config says of its head."""

    rank: int
    kind: HeadKind


def read_markov(stated: Mapping[str, Any], drafter: PublishedDraft) -> MarkovFacts:
    """Return what a config says of the head; raises EdgespecError for a kind that is not known."""
    name = stated.get("markov_head_type") or "vanilla"
    kind = next((known for known in HEAD_KINDS if known == name), None)
    if kind is None:
        raise drafter.wrong(f"states markov_head_type = {name!r}, which is none of {', '.join(HEAD_KINDS)}")
    if drafter.flag(stated, "dspark_backbone_conv_enabled"):
        raise drafter.wrong("has convolutions between its layers, which are not read")
    return MarkovFacts(rank=drafter.count(stated, "markov_rank", default=256), kind=kind)


class MarkovHead(nn.Module):
    """Makes the bias of a place from the token before it."""

    def __init__(self, facts: MarkovFacts, output: OutputFacts, *, hidden_size: int) -> None:
        super().__init__()
        self.kind, self.rank = facts.kind, facts.rank
        self.markov_w1 = nn.Embedding(output.vocab_size, facts.rank)
        self.markov_w2 = nn.Linear(facts.rank, output.draft_vocab_size, bias=False)
        if facts.kind == "gated":
            self.gate_proj = nn.Linear(hidden_size + facts.rank, facts.rank)
        elif facts.kind == "rnn":
            self.joint_proj = nn.Linear(2 * facts.rank + hidden_size, 3 * facts.rank)

    def forward(self, tokens: Tensor, hidden: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return what biases are made of [k, r], and states [k, r].

        They follow tokens [k] at places of hidden states [k, h], whose parents have left `states` [k, r].
        """
        before: Tensor = self.markov_w1(tokens)
        if self.kind == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat([hidden, before], -1))) * before, states
        if self.kind == "rnn":
            gate, candidate, found = self.joint_proj(torch.cat([states, before, hidden], -1)).chunk(3, -1)
            share = torch.sigmoid(gate)
            return torch.tanh(found), share * states + (1 - share) * torch.tanh(candidate)
        return before, states


def bias_of(draft: PreTrainedModel, latent: Tensor, vocab: int) -> Tensor:
    """Return what a DSpark drafter adds to the logits of all `vocab` tokens [k, V], made of `latent` [k, r]."""
    markov = draft.markov
    assert isinstance(markov, MarkovHead)
    known: Tensor = markov.markov_w2(latent)
    offsets = getattr(draft.lm_head, "d2t", None)
    if not isinstance(offsets, Tensor):
        return known
    ids = torch.arange(offsets.shape[0], device=offsets.device) + offsets
    return known.new_zeros(*known.shape[:-1], vocab).index_copy_(-1, ids, known)
