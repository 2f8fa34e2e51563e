"""The caches of texts: those that are kept for what comes next, and whose beginning a new text can start from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.model.causal_model import CausalModel
from edgespec.model.text_cache import TextCache, shared_length

TURN_TOKENS = 16  # at a prompt's end that a later turn may write otherwise


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class TextCaches:
    """The rows of one text in both models."""

    target: TextCache
    draft: TextCache | None

    def shared(self, ids: Sequence[int]) -> int:
        """Return how many of the ids' first rows the target's cache has."""
        return shared_length(self.target.ids, ids)

    @property
    def step_rows(self) -> int:
        """The rows that memory grows by."""
        return max(cache.step_rows for cache in (self.target, self.draft) if cache is not None)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRoom:
    """The memory that is planned for texts, and that those under way leave."""

    num_texts: int
    num_tokens: int
    allows_more: bool = True  # short texts may be more than `num_texts`

    def holds(self, kept: Sequence[TextCaches]) -> bool:
        """Return whether it is enough for these caches."""
        num_more = max(0, len(kept) - max(0, self.num_texts))
        has_states = any(caches.target.has_states for caches in kept)  # as large for a short text as for a long one
        if num_more and (has_states or not self.allows_more):
            return False
        # What memory grows by is planned for `num_texts` alone.
        tokens = sum(len(caches.target.ids) for caches in kept)
        return tokens + num_more * max((caches.step_rows for caches in kept), default=0) <= self.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Kept:
    """The caches of a text that has ended."""

    caches: TextCaches
    num_asked: int  # tokens of its prompt: a later turn of the same conversation begins with them


class KeptCaches:
    """Caches of texts that have ended, the one used last at the end."""

    def __init__(self) -> None:
        self._kept: list[_Kept] = []

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def all(self) -> list[TextCaches]:
        """All that are kept, those used last at the end."""
        return [kept.caches for kept in self._kept]

    def keep(self, caches: TextCaches, *, num_asked: int) -> None:
        """Keep the caches of a text with so long a prompt for one that goes on."""
        self._kept = [*self._kept, _Kept(caches=caches, num_asked=num_asked)]

    def forget(self) -> None:
        """Let all caches go."""
        self._kept = []

    def fit(self, room: KeptRoom) -> None:
        """Let the oldest go until there is room for the others."""
        kept = self._kept
        while kept and not room.holds([one.caches for one in kept]):
            kept = kept[1:]
        self._kept = kept

    def has(self, ids: Sequence[int]) -> bool:
        """Return whether some of these ids are kept."""
        return any(kept.caches.shared(ids) for kept in self._kept)

    def take(self, ids: Sequence[int], room: KeptRoom, *, more_than: int = 0) -> TextCaches | None:
        """Return the caches that have most of these ids; None where none has more than so many.

        Those of an earlier turn are kept no more. Of another conversation, which begins alike, a copy is made of
        what is alike, where `room` beside the new text is enough once the oldest have gone.
        """
        best = max(self._kept, key=lambda kept: kept.caches.shared(ids), default=None)
        shared = 0 if best is None else best.caches.shared(ids)
        if best is None or shared <= more_than:
            return None
        if shared < best.num_asked - TURN_TOKENS:
            others = self._kept
            while others[0] is not best and not room.holds([kept.caches for kept in others]):
                others = others[1:]
            if room.holds([kept.caches for kept in others]):
                self._kept = others
                beginning = best.caches.copy_of(ids[:shared])
                return beginning if len(beginning.target.ids) > more_than else None  # states may not reach back
        self._kept = [kept for kept in self._kept if kept is not best]
        return best.caches
