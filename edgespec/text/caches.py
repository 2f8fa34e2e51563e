"""The caches of texts: those that are kept for what comes next, and whose beginning a new text can start from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.model.causal_model import CausalModel
from edgespec.model.text_cache import TextCache, shared_length


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TextCaches:
    """The rows of one text in both models."""

    target: TextCache
    draft: TextCache | None

    def shared(self, ids: Sequence[int]) -> int:
        """Return how many of the ids' first rows the target's cache has."""
        return shared_length(self.target.ids, ids)

    def copy_of(self, ids: Sequence[int]) -> TextCaches:
        """Return caches of their own with the rows of these ids, as far as they are there."""
        draft = self.draft
        return TextCaches(
            target=self.target.copy(self.shared(ids)),
            draft=None if draft is None else draft.copy(shared_length(draft.ids, ids)),
        )


def new_caches(target: CausalModel, draft: CausalModel | None) -> TextCaches:
    """Return empty caches."""
    return TextCaches(target=target.new_text(), draft=None if draft is None else draft.new_text())


class KeptCaches:
    """Caches of texts that have ended, the one used last at the end."""

    def __init__(self) -> None:
        self._kept: list[TextCaches] = []

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, caches: TextCaches, *, most: int) -> None:
        """Keep caches for a text that goes on; of more than `most` the oldest go."""
        self._kept = [*self._kept, caches][max(0, len(self._kept) + 1 - most) :]

    def forget(self, count: int | None = None) -> None:
        """Let all caches go, or the oldest `count`."""
        self._kept = [] if count is None else self._kept[count:]

    def has(self, ids: Sequence[int]) -> bool:
        """Return whether some of these ids are kept."""
        return any(caches.shared(ids) for caches in self._kept)

    def take(self, ids: Sequence[int]) -> TextCaches | None:
        """Return the caches that have most of these ids, which are kept no more; None where none has any."""
        best = max(self._kept, key=lambda caches: caches.shared(ids), default=None)
        if best is None or not best.shared(ids):
            return None
        self._kept.remove(best)
        return best
