"""The head of a published draft, which knows all of the target's tokens, or the most frequent ones.

Legend: h the draft's width, V the target's tokens, Vd those that the draft knows.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig


class OutputFacts(Protocol):
    """What a head's output depends on."""

    @property
    def named(self) -> str:
        """The folder, in errors."""

    @property
    def vocab_size(self) -> int:
        """The number of the target's tokens."""

    @property
    def draft_vocab_size(self) -> int:
        """The number of those that the head knows."""

    @property
    def has_map(self) -> bool:
        """Whether `d2t` says which they are."""

    @property
    def map_dtype(self) -> torch.dtype:
        """Its numbers' type."""

    @property
    def norm_output(self) -> bool:
        """Whether outputs are normed before they come here."""


class KnownTokensHead(nn.Module):
    """The head's last norm, where its output is recycled without it, and the logits of the tokens that it knows."""

    d2t: Tensor  # [Vd], where the head knows some of the tokens: what is added to a token's own number

    def __init__(self, facts: OutputFacts, config: PretrainedConfig, norm: Any) -> None:
        super().__init__()
        self.num_tokens = facts.vocab_size
        self.scale, self.cap = 1.0, 0.0  # of logits; 0 for no cap
        self.norm = nn.Identity() if facts.norm_output else norm(config.hidden_size)
        self.linear = nn.Linear(config.hidden_size, facts.draft_vocab_size, bias=False)
        if facts.has_map:
            self.register_buffer("d2t", torch.zeros(facts.draft_vocab_size, dtype=facts.map_dtype))

    @property
    def weight(self) -> Tensor:
        """The weight [Vd, h] of the logits."""
        return self.linear.weight

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits [..., V] of outputs [..., h]; tokens that the head does not know have none."""
        known: Tensor = self.linear(self.norm(hidden))
        known = known * self.scale if self.scale != 1 else known
        known = self.cap * torch.tanh(known / self.cap) if self.cap else known
        if not hasattr(self, "d2t"):
            return known
        ids = torch.arange(self.d2t.shape[0], device=self.d2t.device) + self.d2t
        logits = known.new_full((*known.shape[:-1], self.num_tokens), -torch.inf)
        return logits.index_copy_(-1, ids, known)
