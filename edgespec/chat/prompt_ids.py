"""A prompt's token ids, whatever its form: a text, messages, or another library's list of whole numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

from edgespec.chat.chat_template import template_ids
from edgespec.chat.continued import goes_on
from edgespec.errors import EdgespecError
from edgespec.text.token_ids import Prompt, encoded, token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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


def are_messages(prompt: object) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    """Return whether a prompt is a list of messages."""
    return isinstance(prompt, Sequence) and bool(prompt) and all(isinstance(item, Mapping) for item in prompt)
