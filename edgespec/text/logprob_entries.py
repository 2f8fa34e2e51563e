"""Log-probabilities of a text's tokens, as a record and as OpenAI's two forms of responses have them."""

from __future__ import annotations

import codecs
import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from edgespec.text.token_text import CUT_CHARACTER, byte_letters

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from edgespec.sampling.logprobs import TokenLogprob

_UNSEEN = 4  # characters of a text that no token before may have shown
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def logprob_fields(tokenizer: PreTrainedTokenizerBase, logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Return OpenAI's entry of each token, with its id."""
    named = functools.cache(functools.partial(_named, tokenizer))
    return [
        {
            **named(found.token),
            "logprob": found.logprob,
            "top_logprobs": [{**named(token), "logprob": logprob} for token, logprob in found.top],
        }
        for found in logprobs
    ]


def prompt_fields(
    tokenizer: PreTrainedTokenizerBase, first: int, logprobs: Sequence[TokenLogprob]
) -> list[dict[str, Any]]:
    """Return the entries of a prompt whose tokens from the second on have these; before the first stands nothing."""
    nothing = {"logprob": None, "top_logprobs": None}
    return [{**_named(tokenizer, first), **nothing}, *logprob_fields(tokenizer, logprobs)]


def _named(tokenizer: PreTrainedTokenizerBase, token: int) -> dict[str, Any]:
    text = _text(tokenizer, token)
    return {"token": text, "token_id": token, "bytes": _bytes(tokenizer, token, text)}


class TokenPlaces:
    """Where the new tokens of a text begin in it, as they come: parts of one character begin where it does."""

    def __init__(self, start: int = 0) -> None:
        """Begin after `start` characters."""
        self._at, self._characters = start, codecs.getincrementaldecoder("utf-8")("replace")

    def following(self, entries: Sequence[dict[str, Any]]) -> list[int]:
        """Return the places of the next tokens."""
        lengths = [len(piece) for piece in _pieces(entries, self._characters)]
        *places, self._at = itertools.accumulate(lengths, initial=self._at)
        return places


def completion_logprobs(
    entries: Sequence[dict[str, Any]], *, prompt: str = "", num_prompt: int = 0, places: TokenPlaces | None = None
) -> dict[str, Any]:
    """Return the entries as a plain completion has them: `num_prompt` of a prompt, and those of new tokens after it.

    Offsets count from the beginning of what is sent; `places` of a text that comes in parts go on from part to part.
    """
    places = places or TokenPlaces(len(prompt))
    tops = [entry["top_logprobs"] for entry in entries]
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": [None if top is None else {one["token"]: one["logprob"] for one in top} for top in tops],
        "text_offset": [*_prompt_places(prompt, entries[:num_prompt]), *places.following(entries[num_prompt:])],
    }


def _prompt_places(text: str, entries: Sequence[dict[str, Any]]) -> Iterator[int]:
    """Yield where tokens stand in their text; one that is not seen there, as a mark before it, has no length."""
    at = 0
    for token in _pieces(entries, codecs.getincrementaldecoder("utf-8")("replace")):
        tries = [(text.find(piece, at, at + len(piece) + _UNSEEN), piece) for piece in (token, token.lstrip()) if piece]
        found, piece = next((pair for pair in tries if pair[0] >= 0), (at, ""))
        yield found
        at = found + len(piece)


def _pieces(entries: Sequence[dict[str, Any]], characters: codecs.IncrementalDecoder) -> Iterator[str]:
    """Yield what each token adds in whole characters: one that ends inside a character leaves it to the next."""
    for entry in entries:
        yield entry["token"] if entry["bytes"] is None else characters.decode(bytes(entry["bytes"]))


def _text(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """Return what a token adds to a text after itself, because some tokenizers drop a space at the beginning."""
    one, two = (tokenizer.decode([token] * count, clean_up_tokenization_spaces=False) for count in (1, 2))
    return str(two)[len(one) :]


def _bytes(tokenizer: PreTrainedTokenizerBase, token: int, text: str) -> list[int] | None:
    """Return the bytes of a token, also of one that is a part of a character; None where they are not known."""
    if CUT_CHARACTER not in text:
        return list(text.encode())
    piece = str(tokenizer.convert_ids_to_tokens(token))
    byte = _BYTE_TOKEN.fullmatch(piece)
    if byte:
        return [int(byte[1], 16)]
    alphabet = byte_letters()
    return [alphabet[letter] for letter in piece] if set(piece) <= alphabet.keys() else None
