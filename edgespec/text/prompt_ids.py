"""A prompt's token ids, whatever its form: a text, messages, or another library's list of whole numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

from edgespec.errors import EdgespecError
from edgespec.inputs import shown
from edgespec.text.chat_template import encoded, template_ids
from edgespec.text.continued import goes_on

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Array(Protocol):
    """A tensor or an array of any library."""

    def tolist(self) -> Any:
        """Return its numbers as lists."""


# A text, token ids (also as a tensor, an array, or a tokenizer's encoding), or messages
Prompt = str | Sequence[int] | Sequence[Mapping[str, str]] | Mapping[str, Any] | Array

_FIX = "Give a text, a list of token ids, or a list of messages."


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    *,
    values: Mapping[str, Any] | None = None,
    max_tokens: int | None = None,
    continues: bool | None = None,
) -> list[int]:
    """Return a prompt's ids, whatever its form; a chat template reads `values` beside messages.

    Where the last message is the assistant's its text goes on, unless `continues` or its `prefix` is false.
    Raises EdgespecError where it has none, or is no prompt.
    """
    if isinstance(prompt, str):
        ids = encoded(tokenizer, prompt, max_tokens=max_tokens)
    elif are_messages(prompt):
        goes = goes_on(prompt, continues)
        ids = template_ids(tokenizer, prompt, values=values, max_tokens=max_tokens, continues=goes)
    else:
        ids = token_ids(prompt)
    if not ids:
        raise EdgespecError("E_PROMPT_EMPTY", "the prompt has no tokens.", "Give at least one character.")
    return ids


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


def are_messages(prompt: object) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    """Return whether a prompt is a list of messages."""
    return isinstance(prompt, Sequence) and bool(prompt) and all(isinstance(item, Mapping) for item in prompt)


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
