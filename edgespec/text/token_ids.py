"""A text's token ids: of its characters, or of another library's list of whole numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, Protocol

from edgespec.errors import EdgespecError
from edgespec.model.picture_prompt import PicturePrompt
from edgespec.validation import is_text, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PIECE_CHARACTERS = 1 << 16  # of a long text whose tokens are counted


class Array(Protocol):
    """A tensor or an array of any library."""

    def tolist(self) -> Any:
        """Return its numbers as lists."""


# A text, token ids (also as a tensor, an array, or a tokenizer's encoding), messages, or what a processor made
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any] | Array | PicturePrompt

_FIX = "Give a text, a list of token ids, or a list of messages."


def encoded(
    tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None
) -> list[int]:
    """Return a text's ids; raises EdgespecError for half a surrogate pair, and for far more ids than `max_tokens`.

    A long text is counted in pieces first, because a tokenizer notes a hundred bytes and more of every token. Where it
    is cut a few tokens come out otherwise: twice as many as there may be are too many in any case.
    """
    if not is_text(text):
        what = "the prompt holds half a surrogate pair, which is no character."
        raise EdgespecError("E_PROMPT_INVALID", what, "Leave it out, or write the whole character.")
    try:
        if max_tokens is not None and len(text) > PIECE_CHARACTERS:
            _check_length(tokenizer, text, max_tokens)
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))
    except EdgespecError:
        raise
    except Exception as error:  # a tokenizer's files may ask for what cannot be done
        what = f"the model's tokenizer fails ({type(error).__name__}: {error})."
        raise EdgespecError("E_TOKENIZER", what, "Download its files again.") from error


def _check_length(tokenizer: PreTrainedTokenizerBase, text: str, max_tokens: int) -> None:
    """Raise EdgespecError for a text of twice as many tokens as there may be."""
    num_tokens = 0
    for start in range(0, len(text), PIECE_CHARACTERS):
        num_tokens += len(tokenizer.encode(text[start : start + PIECE_CHARACTERS], add_special_tokens=False))
        if num_tokens > 2 * max_tokens:
            what = f"the prompt has more than {2 * max_tokens} tokens, and the context holds {max_tokens}."
            raise EdgespecError("E_CONTEXT", what, "Shorten the prompt.")


def token_ids(prompt: object, *, with_padding: bool = False) -> list[int]:
    """Return the ids of one text, without padding where an encoding has an attention mask.

    Raises EdgespecError for several texts, and for what is no list of whole numbers.
    """
    mask = None if with_padding else _member(prompt, "attention_mask")
    ids = _one_list(prompt)
    if not all(isinstance(token, Integral) and not isinstance(token, bool) for token in ids):
        raise EdgespecError("E_PROMPT_INVALID", f"{shown(ids)} is no prompt.", _FIX)
    if mask is None:
        return list(map(int, ids))
    is_read = _one_list(mask)
    if len(is_read) != len(ids):
        what = f"the prompt has {len(ids)} token ids, and an attention mask of {len(is_read)}."
        raise EdgespecError("E_PROMPT_INVALID", what, "Give the token ids alone.")
    return [int(token) for token, reads in zip(ids, is_read, strict=True) if reads]


def _member(value: object, name: str) -> object:
    """Return what an encoding has under a name, as a mapping's value or an attribute; None where it is none."""
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _one_list(value: object) -> list[Any]:
    """Return the items of one text's list; raises EdgespecError for several texts, and for what is no list."""
    ids = _member(value, "input_ids")
    items = _plain(value if ids is None else ids)
    if isinstance(items, list) and len(items) == 1 and isinstance(items[0], list):
        items = items[0]
    if not isinstance(items, list):
        raise EdgespecError("E_PROMPT_INVALID", f"{shown(value)} is no prompt.", _FIX)
    if items and all(isinstance(item, list | str) for item in items):
        what = f"{shown(items)} is a list of {len(items)} prompts, and a text continues one."
        raise EdgespecError("E_PROMPT_INVALID", what, "Give one of them, or a request for each to 'generate_many'.")
    return items


def _plain(value: Any) -> Any:
    """Return lists, tensors and arrays as lists of Python's own values, and anything else as it is."""
    if isinstance(value, str | bytes | bytearray | memoryview):
        return value
    if callable(getattr(value, "tolist", None)):
        try:
            return value.tolist()
        except Exception:  # a tensor without numbers, of whatever library
            return value
    return [_plain(item) for item in value] if isinstance(value, Sequence) else value
