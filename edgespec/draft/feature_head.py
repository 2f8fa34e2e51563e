"""A feature head is a drafter that continues the target's own hidden states.

EAGLE, HASS and CORAL heads all draft so (CORAL, section 2.2). The row of a token is made of its embedding and
of the feature before it: the target's own for committed text, the head's own within a tree. When a path has
become text, its rows are computed again from the features of the target's pass; the root's row was made of the
target's feature already, and stays. Legend: h the target's hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from edgespec.config import DraftSampling
from edgespec.draft import Path
from edgespec.draft.assistant import AssistantDrafter
from edgespec.draft.axes_rotation import has_axes
from edgespec.draft.block import BlockDrafter, MarkovBlockDrafter, SelectorBlockDrafter
from edgespec.draft.head_router import HeadRouter, routed_log_probs
from edgespec.draft.language_model import LanguageModelDrafter, refuse_not_finite
from edgespec.draft.own_parts import lent_layers
from edgespec.model.causal_model import CausalModel
from edgespec.model.row_chunks import row_chunks
from edgespec.model.target import Target
from edgespec.model.text_cache import TextCache
from edgespec.sampling.distribution import to_draft_probs


class FeatureHeadDrafter(LanguageModelDrafter):
    """Drafts with a head of the target, whose text `target` is."""

    def __init__(
        self,
        head: CausalModel,
        target: TextCache,
        *,
        vocab: int,
        sampling: DraftSampling,
        cache: TextCache | None = None,
    ) -> None:
        """Read the features of `target`, which must keep its hidden states and be at the same text."""
        super().__init__(head, vocab=vocab, sampling=sampling, cache=cache)
        self._target = target
        router = getattr(head.model, "router", None)
        self._router: HeadRouter | None = router if isinstance(router, HeadRouter) else None
        self.heads_join = self._router is None  # which groups are computed depends on the text's own rows

    def _num_lasting(self, rows: list[int]) -> int:
        """Return 1, for the root's row: those below it were made of the head's own features."""
        del rows
        return 1

    def _features_before(self, first: int, end: int) -> Tensor:
        """Return the target's features of the positions before [first, end): [end - first, h]."""
        return self._target.features_before(first, end)

    def _features_of(self, rows: Tensor) -> Tensor:
        """Return the head's own features of this tree's rows [k]: [k, h]."""
        return self.hidden(rows)

    def q_of(self, hidden: Tensor, *, is_checked: bool, paths: Sequence[Path] | None = None) -> Tensor:
        """Return q [k, vocab] of the head's features [k, h], over the groups that the router chooses.

        Raises EdgespecError where logits are to be checked and are not finite.
        """
        if self._router is None:
            return super().q_of(hidden, is_checked=is_checked, paths=paths)
        q = []
        for rows in row_chunks(hidden.shape[0], self.model.vocab):
            log_probs, tokens = routed_log_probs(self._router, self.model, hidden[rows])
            if is_checked:
                refuse_not_finite(log_probs)
            if self.process is None:
                q.append(self._spread(to_draft_probs(log_probs, self.sampling), tokens, nothing=0))
            else:
                every = self._spread(log_probs, tokens, nothing=-torch.inf)
                q.append(self._probabilities(every, None if paths is None else paths[rows]))
        return torch.cat(q)

    def _spread(self, values: Tensor, tokens: list[slice], *, nothing: float) -> Tensor:
        """Return values [k, vocab] from those [k, g] of some ranges of tokens; other tokens have `nothing`."""
        every = values.new_full((values.shape[0], self._vocab), nothing)
        for which, part in zip(tokens, values.split([which.stop - which.start for which in tokens], -1), strict=True):
            end = min(which.stop, self._vocab)  # rows of padding are cut off
            every[:, which.start : end] = part[:, : end - which.start]
        return every


def open_drafter(
    draft: CausalModel,
    target: Target,
    *,
    sampling: DraftSampling,
    cache: TextCache | None = None,
    is_copy: bool = False,
) -> LanguageModelDrafter:
    """Return a drafter of any kind of draft for the text of `target`, which draws by `sampling`.

    A copy of the target, and what reads the target's states, read rows of pictures as the target does; others leave
    these rows out. Words are embedded by a head's own table.
    """
    drafter = _open_drafter(draft, target, sampling=sampling, cache=cache)
    drafter.sees = is_copy or type(drafter) is not LanguageModelDrafter
    seen = target.seen
    if seen is not None and not is_copy:
        seen = seen.of_head(draft.config.hidden_size, has_axes=has_axes(draft.config))
    drafter.seen = seen
    return drafter


def _open_drafter(
    draft: CausalModel, target: Target, *, sampling: DraftSampling, cache: TextCache | None
) -> LanguageModelDrafter:
    if hasattr(draft.model, "block"):
        kinds = {"markov": MarkovBlockDrafter, "selector": SelectorBlockDrafter}
        kind = next((of for name, of in kinds.items() if hasattr(draft.model, name)), BlockDrafter)
        return kind(draft, target.cache, vocab=target.vocab, sampling=sampling, cache=cache)
    if lent_layers(draft.model):
        return AssistantDrafter(draft, target.cache, vocab=target.vocab, sampling=sampling, cache=cache)
    if hasattr(draft.model, "fuse"):
        return FeatureHeadDrafter(draft, target.cache, vocab=target.vocab, sampling=sampling, cache=cache)
    return LanguageModelDrafter(draft, vocab=target.vocab, sampling=sampling, cache=cache)
