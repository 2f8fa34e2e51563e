"""The text of tokens as they come: what each of them adds, in whole characters, and what is left when no more come.

The tokenizer itself decodes every piece, after a few of the tokens before it, so that a token costs the same in a text
of any length, and no order of tokens can fail. Tokens that may end inside a character wait for what follows: a
decoder with a fallback to bytes (Llama 2, Mistral, Gemma) judges a run of bytes as a whole, and one bad byte makes
all of them unreadable. At most MAX_WAITING tokens wait; a longer run is read in parts.
"""

from __future__ import annotations

import codecs
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

CUT_CHARACTER = "\ufffd"  # what decoding makes of a part of a character
MAX_WAITING = 64
_MAX_BEFORE = 16  # tokens without text, at the beginning
_LAST_ID = 2**32 - 1  # that a tokenizer takes
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")
_NEVER_LAST = " 'nvr"  # in what transformers' cleaning of spaces looks for, which all begins with a space
_CLEANS_BPE = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decoding:
    """How a tokenizer makes text."""

    backend: Tokenizer
    special: frozenset[int]
    start: tuple[int, ...]  # a token with text of its own: what follows it is not at the beginning of a text
    has_byte_letters: bool  # as GPT-2's, where a token's letters stand for bytes
    cleaner: Callable[[str], str] | None  # takes spaces before punctuation away

    def name(self, token: int, *, keeps_special: bool) -> str | None:
        """Return the token as the vocabulary has it, and None for one that leaves no text or is none."""
        leaves_text = 0 <= token <= _LAST_ID and (keeps_special or token not in self.special)
        return self.backend.id_to_token(token) if leaves_text else None

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of known tokens."""
        return self.backend.decode(tokens, skip_special_tokens=False) if tokens else ""

    def clean(self, text: str) -> str:
        """Return text as transformers shows it."""
        return self.cleaner(text) if self.cleaner else text


class TokenText:
    """The text of one sequence of tokens; with `rest` it is at any time what the tokenizer makes of them all."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, without: frozenset[int] = frozenset(), keeps_special: bool = False
    ) -> None:
        """Begin; tokens `without` text are left out, as are ids that are no token, and special ones unless kept."""
        self._decoding, self._without, self._keeps_special = _decoding(tokenizer), without, keeps_special
        self._before: tuple[int, ...] = ()  # what the waiting tokens are read after
        self._waiting: list[int] = []
        self._has_begun = False
        self._unclean = ""  # text whose spaces may still go
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def step(self, token: int) -> str:
        """Return what the text gains by a token."""
        name = None if token in self._without else self._decoding.name(token, keeps_special=self._keeps_special)
        if name is None:
            return ""
        self._waiting.append(token)
        if not self._may_end_inside_character(name):
            return self._gain(len(self._waiting), last=(token,))
        # Nothing is read after a part of a character.
        return self._gain(self._num_readable(), last=()) if len(self._waiting) >= MAX_WAITING else ""

    def rest(self) -> str:
        """Return what the text gains if it ends here: a part of a character shows as U+FFFD."""
        return self._decoding.clean(self._unclean + self._text_of(len(self._waiting)))

    def _may_end_inside_character(self, name: str) -> bool:
        if not self._decoding.has_byte_letters:
            return _BYTE_TOKEN.fullmatch(name) is not None
        letters = byte_letters()
        is_bytes = letters.keys() >= set(name)
        self._characters.decode(bytes(letters[letter] for letter in name) if is_bytes else name.encode())
        return bool(self._characters.getstate()[0])

    def _num_readable(self) -> int:
        """Return how many of many waiting tokens end with a whole character."""
        most = len(self._waiting)
        counts = range(most, most - 4, -1)
        return next((count for count in counts if not self._text_of(count).endswith(CUT_CHARACTER)), most - 1)

    def _text_of(self, count: int) -> str:
        """Return the text of the first waiting tokens."""
        if not self._waiting:
            return ""
        text = self._decoding.text
        return text((*self._before, *self._waiting[:count]))[len(text(self._before)) :]

    def _gain(self, count: int, *, last: tuple[int, ...]) -> str:
        """Return the text of the first waiting tokens; the next are read after the `last` of them."""
        text = self._text_of(count)
        self._has_begun = self._has_begun or bool(text)
        start = self._decoding.start if self._has_begun else (*self._before, *self._waiting[: count - len(last)])
        self._before = (*start, *last)[-_MAX_BEFORE:]
        del self._waiting[:count]
        return self._settled(text)

    def _settled(self, text: str) -> str:
        """Return what no cleaning of spaces can change any more."""
        if self._decoding.cleaner is None:
            return text
        text = self._unclean + text
        space = text.find(" ", len(text.rstrip(_NEVER_LAST)))
        end = len(text) if space < 0 else space
        self._unclean = text[end:]
        return self._decoding.clean(text[:end])


def text_of_tokens(
    tokenizer: PreTrainedTokenizerBase,
    tokens: Iterable[int],
    *,
    without: frozenset[int] = frozenset(),
    keeps_special: bool = False,
) -> str:
    """Return the whole text of tokens."""
    text = TokenText(tokenizer, without=without, keeps_special=keeps_special)
    return "".join([*map(text.step, tokens), text.rest()])


def text_with_special(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str | None:
    """Return the text of tokens with the special ones among them; None where there are none."""
    if _decoding(tokenizer).special.isdisjoint(tokens):
        return None
    return text_of_tokens(tokenizer, tokens, keeps_special=True).rstrip(CUT_CHARACTER)


@functools.lru_cache(maxsize=8)
def _decoding(tokenizer: PreTrainedTokenizerBase) -> _Decoding:
    backend: Tokenizer = tokenizer.backend_tokenizer
    added = backend.get_added_tokens_decoder().items()
    is_kept = type(backend.model).__name__ == "BPE" and not getattr(tokenizer, _CLEANS_BPE, False)
    return _Decoding(
        backend=backend,
        special=frozenset(index for index, token in added if token.special),
        start=_token_with_text(backend),
        has_byte_letters=b'"type":"ByteLevel"' in (backend.decoder.__getstate__() if backend.decoder else b""),
        cleaner=tokenizer.clean_up_tokenization if tokenizer.clean_up_tokenization_spaces and not is_kept else None,
    )


def _token_with_text(backend: Tokenizer) -> tuple[int, ...]:
    """Return a token that is readable text of its own, if there is one."""
    for token in range(backend.get_vocab_size()):
        text = backend.decode([token], skip_special_tokens=True)
        if text and CUT_CHARACTER not in text and not _BYTE_TOKEN.fullmatch(backend.id_to_token(token) or ""):
            return (token,)
    return ()


@functools.cache
def byte_letters() -> dict[str, int]:
    """Return the letters that byte-level tokenizers write for bytes: those that print are themselves (GPT-2)."""
    printing = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)}
    others = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(256 + index): byte for index, byte in enumerate(others)}
