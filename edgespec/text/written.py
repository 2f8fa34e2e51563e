"""Answers that are read again through a chat template, as the model wrote them: with their special tokens.

Those of an answer are its structure: channels of gpt-oss, calls of Mistral. A template that writes an answer where the
model wrote it, or knows the tokens and cuts some of it out, is followed. Another one frames the answer as a whole, so
that the model would read its frame twice, or refuses such a text; then the answer stands behind what it was written
behind, and the template says what follows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from edgespec.errors import EdgespecError
from edgespec.text.token_text import text_with_special

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from edgespec.text.chat_template import Message

_WRITTEN = "written"  # of a message: its text with special tokens, where it has any
_MARK = "8153-edgespec-answer"
Messages = Sequence[Mapping[str, Any]]
Render = Callable[[Messages], str]  # messages -> the prompt up to the next answer


def message_fields(tokenizer: PreTrainedTokenizerBase, message: Message) -> dict[str, Any]:
    """Return a message as `as_written` takes it."""
    written = text_with_special(tokenizer, message.token_ids)
    fields = {"role": message.role, "content": message.content}
    return fields if written is None else {**fields, _WRITTEN: written}


def as_written(messages: Messages, render: Render) -> str:
    """Return the prompt in which each answer stands as the model wrote it; raises EdgespecError as `render` does."""
    if not any(_WRITTEN in message for message in messages):
        return render(messages)
    try:
        text = render(_contents(messages))
        if all(_is_told(messages, index, text, render) for index in range(len(messages))):
            return text
    except EdgespecError:  # the template refuses such answers
        pass
    return _behind_what_was_read(messages, render)


def _is_told(messages: Messages, index: int, text: str, render: Render) -> bool:
    """Return whether the prompt has an answer behind what it was written behind, or not as a whole."""
    written = str(messages[index].get(_WRITTEN, "")).strip()
    if not written or written not in text:
        return True
    before = render(_contents(messages[:index])).rstrip()
    return text.startswith(before) and text[len(before) :].lstrip().startswith(written)


def _behind_what_was_read(messages: Messages, render: Render) -> str:
    """Return the prompt in which the template has the words up to an answer, and behind it, and no others."""
    index = max((index for index, message in enumerate(messages) if _WRITTEN in message), default=None)
    if index is None:
        return render(messages)
    plain = [_without(message) for message in messages]
    plain[index]["content"] = _MARK
    text = render(plain)
    behind = text.rpartition(_MARK)[2]
    if behind == text:  # it writes them otherwise, as in capitals
        return text
    return _behind_what_was_read(messages[:index], render) + str(messages[index][_WRITTEN]) + behind


def _contents(messages: Messages) -> list[dict[str, Any]]:
    return [{**_without(message), "content": message.get(_WRITTEN, message.get("content"))} for message in messages]


def _without(message: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name != _WRITTEN}
