"""The router over groups of the language model head: only the groups that a draft needs are computed.

CORAL (section 3.3): softmax(W2(act(W1 h) + h)) over N equal groups of the vocabulary decides which are worth
computing, and tokens are drafted from p(x) = p_router(n) * p_group(x). Tokens of groups that were not computed
have probability 0. Legend: k rows, h hidden size, N groups of `size` tokens, the last one perhaps shorter.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from edgespec.model.causal_model import CausalModel


class HeadRouter(nn.Module):
    """Gives the log-probabilities of the groups; `best_groups` chooses those to compute."""

    def __init__(self, hidden_size: int, num_groups: int, *, top_groups: int) -> None:
        super().__init__()
        self.num_groups, self.top_groups = num_groups, top_groups
        self.inner = nn.Linear(hidden_size, hidden_size, bias=False)
        self.outer = nn.Linear(hidden_size, num_groups, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return log p_router [k, N] of hidden states [k, h]."""
        mixed = nn.functional.silu(self.inner(hidden)) + hidden
        scores: Tensor = self.outer(mixed).float()
        return scores.log_softmax(-1)

    def best_groups(self, log_probs: Tensor) -> list[int]:
        """Return the union of each row's best groups, ascending."""
        best = log_probs.topk(min(self.top_groups, self.num_groups), -1).indices
        found: list[int] = best.unique().tolist()
        return found


def group_size(vocab: int, num_groups: int) -> int:
    """Return the number of tokens of a group."""
    return math.ceil(vocab / num_groups)


def group_tokens(group: int, *, vocab: int, num_groups: int) -> slice:
    """Return the token ids of a group."""
    size = group_size(vocab, num_groups)
    return slice(group * size, min((group + 1) * size, vocab))


def routed_log_probs(router: HeadRouter, model: CausalModel, hidden: Tensor) -> tuple[Tensor, list[slice]]:
    """Return log p(x) [k, g] of the tokens x in the rows' groups, for hidden states [k, h], and those tokens.

    p(x) = p_router(n) * p_group(x) (CORAL, equation 8): over all groups it sums to 1, over some to less.
    """
    log_router = router(hidden)  # [k, N]
    groups = router.best_groups(log_router)
    tokens = [group_tokens(group, vocab=model.vocab, num_groups=router.num_groups) for group in groups]
    logits = model.logits(hidden, tokens).float()
    parts = logits.split([which.stop - which.start for which in tokens], -1)
    log_probs = [part.log_softmax(-1) + log_router[:, group, None] for part, group in zip(parts, groups, strict=True)]
    return torch.cat(log_probs, -1), tokens
