"""Stop strings are found in a text as it is verified, across tokens and bursts, and cut off with all that follows.

This module knows text and token ids, no tokenizer's inside: callables say what a token adds to the text, and what
is left when it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from edgespec.config import require
from edgespec.text.results import TextChunk
from edgespec.text.token_text import CUT_CHARACTER
from edgespec.tuning.step import StepResult

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class StopStrings:
    """The strings that end a text, besides the model's own stop tokens."""

    strings: tuple[str, ...] = ()
    special_tokens: Mapping[int, str] = field(default_factory=dict)  # the strings that are tokens without text

    def __bool__(self) -> bool:
        return bool(self.strings)


def stop_strings(
    tokenizer: PreTrainedTokenizerBase, wanted: str | Sequence[str], *, keeps_special: bool = False
) -> StopStrings:
    """Make one string or several ready; texts may keep special tokens. Raises EdgespecError for an empty one."""
    strings = (wanted,) if isinstance(wanted, str) else tuple(wanted)
    require(all(strings), "a stop string is empty.", "Leave it out.")
    if not strings or keeps_special:
        return StopStrings(strings=strings)
    added = tokenizer.added_tokens_decoder.items()
    special = {index: token.content for index, token in added if token.special and token.content in strings}
    return StopStrings(strings=strings, special_tokens=special)


class TextPieces:
    """Makes text of a text's steps, up to the first stop string, which is not part of it.

    Text that may turn out to begin a stop string is held back until that is known.
    """

    def __init__(self, *, decode: Callable[[int], str], rest: Callable[[], str], stop: StopStrings) -> None:
        """Begin; `decode` gives what a token adds to the text, and `rest` what the text gains if it ends there."""
        self._decode, self._rest, self._stop = decode, rest, stop
        self._held = ""

    def chunk(self, step: StepResult) -> TextChunk:
        """Return a step with its text; its tokens end with the one that completed a stop string."""
        text = self._held
        for count, token in enumerate(step.tokens, 1):
            text += self._decode(token)
            stopped = self._text_if_stopped(text, token) if self._stop else None
            if stopped is not None:
                cut = replace(step, tokens=step.tokens[:count], logprobs=step.logprobs[:count], finish="stop")
                return TextChunk(text=stopped[0], step=cut, stop_string=stopped[1])
        if step.finish:
            return TextChunk(text=text + self._rest(), step=step)
        num_held = _num_undecided(text, self._stop.strings)
        self._held = text[len(text) - num_held :]
        return TextChunk(text=text[: len(text) - num_held], step=step)

    def _text_if_stopped(self, text: str, token: int) -> tuple[str, str] | None:
        """Return the text up to the stop string that the token completed, and that string; None if it did not."""
        rest = self._rest()
        if token in self._stop.special_tokens:
            return text + rest, self._stop.special_tokens[token]
        whole = text + rest.rstrip(CUT_CHARACTER)  # what may become another character is none yet
        found = [(start, string) for string in self._stop.strings if (start := whole.find(string)) >= 0]
        if not found:
            return None
        start, string = min(found, key=lambda match: (match[0], len(match[1])))
        return whole[:start], string


def _num_undecided(text: str, strings: tuple[str, ...]) -> int:
    """Return how many characters at the end may be the beginning of a stop string."""
    longest = min(len(text), max((len(string) - 1 for string in strings), default=0))
    return next(
        (count for count in range(longest, 0, -1) if any(string.startswith(text[-count:]) for string in strings)), 0
    )
