"""Log-probabilities of a text's tokens, as a record and as OpenAI's two forms of responses have them."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from edgespec.text.token_text import CUT_CHARACTER, byte_letters

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from edgespec.sampling.logprobs import TokenLogprob

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def logprob_fields(tokenizer: PreTrainedTokenizerBase, logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Return OpenAI's entry of each token, with its id."""

    @functools.cache
    def named(token: int) -> dict[str, Any]:
        text = _text(tokenizer, token)
        return {"token": text, "token_id": token, "bytes": _bytes(tokenizer, token, text)}

    return [
        {
            **named(found.token),
            "logprob": found.logprob,
            "top_logprobs": [{**named(token), "logprob": logprob} for token, logprob in found.top],
        }
        for found in logprobs
    ]


def completion_logprobs(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the entries as a plain completion has them."""
    tokens = [entry["token"] for entry in entries]
    return {
        "tokens": tokens,
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": [{top["token"]: top["logprob"] for top in entry["top_logprobs"]} for entry in entries],
        "text_offset": [len("".join(tokens[:count])) for count in range(len(tokens))],
    }


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
