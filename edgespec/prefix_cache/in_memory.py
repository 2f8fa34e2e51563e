"""The caches of texts that have ended, kept for those that go on from them: conversations' next turns, above all."""

from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.prefix_cache.caches import TextCaches
from edgespec.prefix_cache.prompt_cache import MIN_TOKENS, PromptCache
from edgespec.prefix_cache.slots import BetweenSteps, Slots
from offload.adapters.use import AdapterUse

TURN_TOKENS = 4  # at a prompt's end that a later turn may write otherwise, as empty thoughts; a question has more


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheBudget:
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
class _EndedText:
    """The caches of a text that has ended."""

    caches: TextCaches
    num_prompt_tokens: int  # tokens of its prompt: a later turn of the same conversation begins with them
    num_bytes: int


class PrefixCache:
    """Caches of texts that have ended, the one used last at the end, and the files that texts may begin on, too."""

    def __init__(self, between_steps: BetweenSteps) -> None:
        """Keep nothing at first; `between_steps` calls a function while no text changes."""
        self._ended: list[_EndedText] = []
        self._between_steps = between_steps
        self.prompt_cache: PromptCache | None = None  # a file of what prompts begin with
        self.slots: Slots | None = None  # a folder of conversations, which `store` writes
        self.allows_more = True  # than texts may be under way, until memory runs out
        self.most_bytes: int | None = None  # None: all that is planned for texts

    def __len__(self) -> int:
        return len(self._ended)

    @property
    def num_tokens(self) -> int:
        """The number of tokens whose rows are kept; the memory for them is planned, for texts under way."""
        return sum(len(text.caches.target.ids) for text in self._ended)

    @property
    def num_bytes(self) -> int:
        """The memory that is kept."""
        return sum(text.num_bytes for text in self._ended)

    @property
    def files(self) -> PromptCache | Slots | None:
        """The files that texts begin on."""
        return self.slots or self.prompt_cache

    def store(self) -> int:
        """Write what is kept to the folder of `slots`, and return how many texts were written; any thread may."""
        if self.slots is None:
            return 0
        return self.slots.store(lambda: [text.caches for text in self._ended], self._between_steps)

    def keep(self, caches: TextCaches, *, num_prompt_tokens: int) -> None:
        """Keep the caches of a text with so long a prompt for one that goes on."""
        self._ended = [
            *self._ended,
            _EndedText(caches=caches, num_prompt_tokens=num_prompt_tokens, num_bytes=caches.num_bytes),
        ]

    def forget(self) -> None:
        """Let all caches go."""
        self._ended = []

    def fit(self, budget: CacheBudget) -> None:
        """Let the oldest go until there is room for the others, and they are within the bound."""
        kept, num_bytes = self._ended, self.num_bytes
        most_bytes = num_bytes if self.most_bytes is None else self.most_bytes
        while kept and (num_bytes > most_bytes or not budget.holds([text.caches for text in kept])):
            num_bytes -= kept[0].num_bytes
            kept = kept[1:]
        self._ended = kept

    def has(self, ids: Sequence[int], adapters: AdapterUse = ()) -> bool:
        """Return whether some of these ids are kept, with these adapters."""
        return any(text.caches.shared(ids, adapters) for text in self._ended)

    def take(self, ids: Sequence[int], budget: CacheBudget, adapters: AdapterUse = ()) -> TextCaches | None:
        """Return the caches that have most of these ids; None where none has any, or a file has clearly more.

        Rows with other adapters, or other scales of the same, are other rows.

        Those of an earlier turn are kept no more. Of another conversation, which begins alike, a copy is made of
        what is alike, where `budget` beside the new text is enough once the oldest have gone.
        """
        more_than = 0 if self.slots is None else max(0, self.slots.shared(ids, adapters) - MIN_TOKENS)
        best = max(self._ended, key=lambda text: text.caches.shared(ids, adapters), default=None)
        shared = 0 if best is None else best.caches.shared(ids, adapters)
        if best is None or shared <= more_than:
            return None
        if shared < best.num_prompt_tokens - TURN_TOKENS:
            others = self._ended
            while others[0] is not best and not budget.holds([text.caches for text in others]):
                others = others[1:]
            if budget.holds([text.caches for text in others]):
                self._ended = others
                beginning = best.caches.copy_of(ids[:shared])
                return beginning if len(beginning.target.ids) > more_than else None  # states may not reach back
        self._ended = [text for text in self._ended if text is not best]
        return best.caches
