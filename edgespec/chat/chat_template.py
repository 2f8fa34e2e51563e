"""The messages of a conversation become token ids: through the model's chat template, or as one plain text.

Without a template a conversation is one text that two sides write in turns: each message begins on a line of its
own where the text before it does not end with one, and an answer continues the text right after the question.
Answers keep the tokens that they were made of, so that they are read as they were written.

A template reads answers with their special tokens, which are their structure: channels of gpt-oss, calls of Mistral. A
template that writes an answer where the model wrote it, or knows the tokens and cuts some of it out, is followed.
Another one frames the answer as a whole, so that the model would read its frame twice, or refuses such a text; then the
answer stands after what it was written after, and the template says what follows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from edgespec.chat.continued import continued
from edgespec.chat.given_template import begins_chats
from edgespec.chat.picture_parts import picture_part
from edgespec.chat.pictures import PictureSource
from edgespec.chat.rendering import rendered
from edgespec.errors import EdgespecError
from edgespec.text.token_ids import encoded
from edgespec.text.token_text import text_with_special

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Role = Literal["system", "user", "assistant", "tool"]
Messages = Sequence[Mapping[str, Any]]
Render = Callable[[Messages], str]  # messages -> the prompt up to the next answer
_WRITTEN = "written"  # of a message: its text with special tokens, where it has any
_MARK = "8153-edgespec-answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a conversation."""

    role: Role
    content: str
    token_ids: tuple[int, ...] = ()  # of an answer: what the model made, its stop token left out
    is_interrupted: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)  # that templates read, as calls, or whose result it is
    pictures: tuple[PictureSource, ...] = ()  # before its words

    @property
    def calls(self) -> Sequence[Mapping[str, Any]]:
        """The calls of tools that the answer makes."""
        found: Sequence[Mapping[str, Any]] = self.more.get("tool_calls", ())
        return found


def message_fields(tokenizer: PreTrainedTokenizerBase, message: Message) -> dict[str, Any]:
    """Return a message as `template_ids` takes it."""
    written = text_with_special(tokenizer, message.token_ids)
    content: Any = message.content
    if message.pictures:
        content = [*map(picture_part, message.pictures), {"type": "text", "text": message.content}]
    fields = {"role": message.role, "content": content, **message.more}
    return fields if written is None else {**fields, _WRITTEN: written}


def template_ids(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    *,
    values: Mapping[str, Any] | None = None,
    first: int = 1,
    max_tokens: int | None = None,
    continues: bool = False,
) -> list[int]:
    """Return the ids up to where the next answer begins, or to the end of the last message that it `continues`.

    The template reads `values` beside the messages.

    Raises EdgespecError without a template, as `rendered` does, and for far more ids than `max_tokens`.
    """
    text = written_by_template(tokenizer, messages, values=values, first=first, continues=continues)
    ids = encoded(tokenizer, text, add_special_tokens=False, max_tokens=max_tokens)
    bos = tokenizer.bos_token_id
    return [bos, *ids] if begins_chats(tokenizer) and bos is not None and ids[:1] != [bos] else ids


def written_by_template(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    *,
    values: Mapping[str, Any] | None = None,
    first: int = 1,
    continues: bool = False,
    placeholder: str = "",
) -> str:
    """Return the text that `template_ids` encodes, in which a picture is a `placeholder`; raises EdgespecError."""
    if not tokenizer.chat_template:
        fix = "Give the prompt as text, use `raw=True`, or give a `chat_template`."
        raise EdgespecError("E_CHAT_TEMPLATE", "the model's tokenizer has no chat template.", fix)

    def render(said: Messages) -> str:
        return rendered(tokenizer, said, values=values, first=first, placeholder=placeholder)

    return continued(messages, render, first=first) if continues else _as_written(messages, render)


def plain_ids(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, max_tokens: int | None = None
) -> list[int]:
    """Return the ids of the messages as one text; each message is encoded alone, never two together.

    Raises EdgespecError for far more ids than `max_tokens`.
    """
    ids: list[int] = []
    before = ""
    for message in messages:
        if message.role == "assistant":
            ids += message.token_ids or encoded(
                tokenizer, message.content, add_special_tokens=False, max_tokens=max_tokens
            )
        else:
            text = f"\n{message.content}" if before and not before.endswith("\n") else message.content
            ids += encoded(tokenizer, text, add_special_tokens=not ids, max_tokens=max_tokens)
        before = message.content or before
    return ids


def _as_written(messages: Messages, render: Render) -> str:
    """Return the prompt in which each answer stands as the model wrote it; raises EdgespecError as `render` does."""
    if not any(_WRITTEN in message for message in messages):
        return render(messages)
    try:
        text = render(_contents(messages))
        if all(_has_answer(messages, index, text, render) for index in range(len(messages))):
            return text
    except EdgespecError:  # the template refuses such answers
        pass
    return _after_what_was_read(messages, render)


def _has_answer(messages: Messages, index: int, text: str, render: Render) -> bool:
    """Return whether the prompt has an answer after what it was written after, or not as a whole."""
    written = str(messages[index].get(_WRITTEN, "")).strip()
    if not written or written not in text:
        return True
    before = render(_contents(messages[:index])).rstrip()
    return text.startswith(before) and text[len(before) :].lstrip().startswith(written)


def _after_what_was_read(messages: Messages, render: Render) -> str:
    """Return the prompt in which the template has the words up to an answer, and after it, and no others."""
    index = max((index for index, message in enumerate(messages) if _WRITTEN in message), default=None)
    if index is None:
        return render(messages)
    plain = [_without(message) for message in messages]
    plain[index]["content"] = _MARK
    text = render(plain)
    after = text.rpartition(_MARK)[2]
    if after == text:  # it writes them otherwise, as in capitals
        return text
    return _after_what_was_read(messages[:index], render) + str(messages[index][_WRITTEN]) + after


def _contents(messages: Messages) -> list[dict[str, Any]]:
    return [{**_without(message), "content": message.get(_WRITTEN, message.get("content"))} for message in messages]


def _without(message: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name != _WRITTEN}
