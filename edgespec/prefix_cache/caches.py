"""The caches of a text in both models, whose beginning another text can start from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.model.causal_model import CausalModel
from edgespec.model.text_cache import TextCache, shared_length
from offload.adapters.use import AdapterUse


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class TextCaches:
    """The rows of one text in both models."""

    target: TextCache
    draft: TextCache | None

    def shared(self, ids: Sequence[int], adapters: AdapterUse) -> int:
        """Return how many of the first rows of a text with these adapters the target's cache has."""
        return shared_length(self.target.ids, ids) if self.target.adapters == adapters else 0

    @property
    def num_bytes(self) -> int:
        """The memory that they take."""
        return self.target.num_bytes + (0 if self.draft is None else self.draft.num_bytes)

    @property
    def step_rows(self) -> int:
        """The rows that memory grows by."""
        return max(cache.step_rows for cache in (self.target, self.draft) if cache is not None)

    def copy_of(self, ids: Sequence[int]) -> TextCaches:
        """Return caches of their own with the rows of these ids, as far as they are there."""
        draft = self.draft
        return TextCaches(
            target=self.target.copy(self.shared(ids, self.target.adapters)),
            draft=None if draft is None else draft.copy(shared_length(draft.ids, ids)),
        )


def new_caches(target: CausalModel, draft: CausalModel | None, adapters: AdapterUse | None = None) -> TextCaches:
    """Return empty caches of a text with these adapters; None: those of texts that choose none.

    A copy of the target has the text's as well.
    """
    of_draft = None if draft is None else draft.new_text(adapters if draft.follows_adapters else None)
    return TextCaches(target=target.new_text(adapters), draft=of_draft)
