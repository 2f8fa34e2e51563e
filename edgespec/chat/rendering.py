"""A conversation through the model's chat template: one text, in which every message is found again.

A template is a program of the model's. It may leave messages out whose role it does not know, want their texts as
parts, or refuse a role; what can be said otherwise is, and a message that would be lost is an error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from edgespec.chat.given_template import check_choice, check_template_args
from edgespec.chat.picture_parts import PICTURE, picture_part, sources_of, text_of
from edgespec.chat.pictures import PictureSource
from edgespec.errors import EdgespecError
from edgespec.validation import parse_json, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBE = "4827"  # and four digits: a text that templates write as it is, whatever they do with letters
SURE_CHARACTERS = 16  # of a text that a prompt does not hold by chance
ROLES = "system, user, assistant or tool"
MESSAGE_FIX = 'Write {"messages": [{"role": "user", "content": "Hello"}]}.'

Fields = dict[str, Any]  # of a message: role, content, and what else the template may read


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    """What the template made of the messages: a text, or why it is none."""

    text: str = ""
    error: EdgespecError | None = None
    is_refused: bool = False  # the template itself raised an error


def rendered(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    values: Mapping[str, Any] | None = None,
    first: int = 1,
    placeholder: str = "",
) -> str:
    """Return the prompt up to where the next answer begins; the template reads `values` beside the messages.

    Each picture has to be there as one `placeholder`. Those of a tool's result go to a user's message behind it where
    the template has no place for them.

    `developer` is `system` where the template loses or refuses it, and where a system message is refused its text
    goes before the first user's. Arguments of calls are JSON, and ids short, where others are refused. Raises
    EdgespecError where the template fails or leaves a message out: `first` is the number of the first one, 0 for a
    system prompt that was put before them.
    """
    values = values or {}
    check_choice(tokenizer, values)
    check_template_args(tokenizer, values)
    template = _Template(tokenizer, values, placeholder)
    chat = [_readable(message, named(number, message)) for number, message in enumerate(messages, first)]
    found = _attempt(template, chat, first)
    for reshaped in (_with_contents, _with_texts_of_arguments, _with_short_ids):
        if found.is_refused and (other := reshaped(chat)) != chat:
            tried, chat = _attempt(template, other, first), other
            found = found if tried.is_refused else tried
    if found.error is not None and any(message["role"] == "developer" for message in chat):
        chat = [{**message, "role": "system"} if message["role"] == "developer" else message for message in chat]
        tried = _attempt(template, chat, first)
        found = tried if tried.error is None or tried.is_refused else found  # which names the role as it was given
    if found.is_refused and (folded := _folded(chat)):
        found = _attempt(template, folded, first + len(chat) - len(folded))
    if found.error is not None and (moved := _with_pictures_behind_results(chat)) != chat:
        tried = _attempt(template, moved, first)
        found = tried if tried.error is None else found
    if found.error is not None:
        raise found.error
    return found.text


def named(number: int, message: Mapping[str, Any]) -> str:
    """Name a message by its number and role."""
    role = message.get("role")
    where = f"message {number}" if number else "the system prompt"
    return f"{where} (role '{role}')" if isinstance(role, str) and number else where


def refuses_system(tokenizer: PreTrainedTokenizerBase, values: Mapping[str, Any] | None = None) -> bool:
    """Return whether the template has no system role, so that its text goes before the first user's message."""
    chat = [{"role": "system", "content": PROBE}, {"role": "user", "content": PROBE}]
    template = _Template(tokenizer, values or {})
    return _attempt(template, chat, 1).is_refused and not _attempt(template, chat[1:], 1).is_refused


def _joined(parts: list[Any], where: str) -> str | list[Fields]:
    """Return the content of a message in parts as one text, a part a line; where pictures are among them, as parts.

    Raises EdgespecError for parts that are sounds, videos or anything else.
    """
    found: list[Fields] = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == PICTURE and isinstance(part[PICTURE], PictureSource):
            found.append(picture_part(part[PICTURE]))
            continue
        text = part.get("text") if isinstance(part, dict) and kind == "text" else None
        if not isinstance(text, str):
            what = f"of type '{kind}'" if isinstance(kind, str) else "without a type"
            fix = "Keep the parts of type text and image; frames of a video may be such."
            raise EdgespecError(
                "E_PROMPT_INVALID", f"{where} has a part {what}, and only text and images are read.", fix
            )
        found.append({"type": "text", "text": text})
    return found if any(part["type"] == PICTURE for part in found) else text_of(found)


def with_text(message: object, where: str) -> Fields:
    """Return a message with its content as one text, None, or parts where it has pictures.

    Raises EdgespecError without a role, and for content that is none of them.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise EdgespecError("E_PROMPT_INVALID", f'{where} has no "role".', MESSAGE_FIX)
    content = message.get("content")
    content = _joined(content, where) if isinstance(content, list) else content
    if content is not None and not isinstance(content, str | list):
        what = f'{where} has "content" {shown(content)}, which is no text.'
        raise EdgespecError("E_PROMPT_INVALID", what, MESSAGE_FIX)
    return {**message, "content": content}


@dataclass(frozen=True, slots=True)
class _Template:
    """A chat template, what it reads beside messages, and what it writes for a picture."""

    tokenizer: PreTrainedTokenizerBase
    values: Mapping[str, Any]
    placeholder: str = ""

    def applied(self, chat: Sequence[Fields]) -> str:
        """Return what it writes; it may raise anything."""
        plain = [_without_sources(message) for message in chat]
        return str(self.tokenizer.apply_chat_template(plain, add_generation_prompt=True, tokenize=False, **self.values))

    def writes_probe(self, chat: list[Fields]) -> bool:
        """Return whether it writes a text that was given to it."""
        try:
            return PROBE in self.applied(chat)
        except Exception:  # a template is a program of the model's: one that fails says why when it is used
            return False


def _without_sources(message: Fields) -> Fields:
    """Return a message as templates read it: of a picture they know that it is there."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": [{"type": PICTURE} if part["type"] == PICTURE else part for part in content]}


def _attempt(template: _Template, chat: list[Fields], first: int) -> _Attempt:
    """Apply the template to texts, and to parts where it wants those and would lose a plain text."""
    found, probe = _applied_whole(template, chat, first), [{"role": "user", "content": PROBE}]
    if found.error is None or template.writes_probe(probe):
        return found
    return _applied_whole(template, _in_parts(chat), first) if template.writes_probe(_in_parts(probe)) else found


def _applied_whole(template: _Template, chat: list[Fields], first: int) -> _Attempt:
    """Apply the template, and look for every message in what it writes."""
    try:
        text = template.applied(chat)
    except Exception as error:  # a template is a program of the model's, and may raise anything
        roles = ", ".join(str(message["role"]) for message in chat)
        what = f"the model's chat template fails for messages of {roles if len(chat) < 9 else 'these roles'} ({error})."
        fix = "Give the messages and `template_args` that it asks for, another `chat_template`, or use `raw=True`."
        return _Attempt(error=EdgespecError("E_CHAT_TEMPLATE", what, fix), is_refused=True)
    lost = _lost(template, chat, text)
    if lost is not None:
        what = f"{named(first + lost, chat[lost])} does not reach the prompt: the model's chat template leaves it out."
        fix = (
            f"Give it a role that the template knows, as {ROLES}; use a `chat_template` that writes it, or `raw=True`."
        )
        return _Attempt(error=EdgespecError("E_PROMPT_INVALID", what, fix))
    num_pictures = len(sources_of(chat))
    if num_pictures and text.count(template.placeholder) != num_pictures:
        count, place = text.count(template.placeholder), template.placeholder
        what = f"the messages have {num_pictures} pictures, and the chat template writes '{place}' {count} times."
        fix = (
            f"Leave '{place}' out of the words, put pictures into the user's messages, or use another `chat_template`."
        )
        return _Attempt(error=EdgespecError("E_CHAT_TEMPLATE", what, fix))
    return _Attempt(text=text)


def _lost(template: _Template, chat: list[Fields], text: str) -> int | None:
    """Return the index of the first message that the text lacks; None where each is there.

    Templates may change what is said, as earlier reasoning that they cut off. So unless all texts stand there one
    after the other, the template is given marks in their place, and those are looked for.
    """
    if _stand_in_order(text, chat):
        return None
    marks = [f"{PROBE}{index:04d}" for index in range(len(chat))]
    try:
        marked = template.applied([_marked(*pair) for pair in zip(chat, marks, strict=True)])
    except Exception:  # a template that reads what is said: nothing is known of it
        return None
    return next((index for index, mark in enumerate(marks) if _says(chat[index]) and mark not in marked), None)


def _stand_in_order(text: str, chat: Sequence[Fields]) -> bool:
    end = 0
    for message in chat:
        content = message.get("content")
        wanted = content.strip() if isinstance(content, str) else ""
        start = text.find(wanted, end)
        if start < 0 or (len(wanted) < SURE_CHARACTERS and _says(message)):
            return False
        end = start + len(wanted)
    return True


def _says(message: Fields) -> bool:
    """Return whether a message has a text that is not blank, or calls of tools."""
    return bool(message.get("tool_calls")) or bool(text_of(message.get("content")).strip())


def _marked(message: Fields, mark: str) -> Fields:
    """Return the message with a mark for its text, and in the names and arguments of the functions that it calls."""
    content, calls = message.get("content"), message.get("tool_calls")
    found = dict(message)
    if content and _says({"content": content}):
        found["content"] = mark if isinstance(content, str) else [{"type": "text", "text": mark}]
    if calls:
        found["tool_calls"] = [_with_arguments(call, partial(_with_mark, mark=mark), name=mark) for call in calls]
    return found


def _with_mark(value: Any, mark: str) -> Any:
    return {**value, mark: mark} if isinstance(value, dict) else None if value is None else mark


def _folded(chat: list[Fields]) -> list[Fields]:
    """Return the messages with the system's texts before the first user's; none where they do not stand there."""
    start = next((index for index, message in enumerate(chat) if message["role"] != "system"), 0)
    if not start or chat[start]["role"] != "user":
        return []
    texts = [text_of(message.get("content")) for message in chat[: start + 1]]
    content: Any = "\n\n".join(text for text in texts if text.strip())
    if isinstance(own := chat[start].get("content"), list):
        content = [{"type": "text", "text": "\n\n".join([*filter(str.strip, texts[:-1]), ""])}, *own]
    return [{**chat[start], "content": content}, *chat[start + 1 :]]


def _with_pictures_behind_results(chat: list[Fields]) -> list[Fields]:
    """Return the messages with the pictures of tools' results in a user's message behind those results."""
    found: list[Fields] = []
    waiting: list[Fields] = []
    for message in [*chat, None]:
        if waiting and (message is None or message["role"] != "tool"):
            if message is not None and message["role"] == "user":
                message = {**message, "content": [*waiting, *_in_parts([message])[0].get("content", [])]}
            else:
                found.append({"role": "user", "content": waiting})
            waiting = []
        if message is None:
            break
        content = message.get("content")
        if message["role"] == "tool" and isinstance(content, list):
            waiting += [part for part in content if part["type"] == PICTURE]
            message = {**message, "content": text_of(content)}
        found.append(message)
    return found


def _in_parts(chat: Sequence[Fields]) -> list[Fields]:
    """Return the messages with their texts as parts; a message that only calls tools has none."""
    found = [dict(message) for message in chat]
    for message in found:
        text = message.get("content")
        if isinstance(text, str):
            message["content"] = [{"type": "text", "text": text}] if text or "tool_calls" not in message else []
    return found


def _readable(message: Mapping[str, Any], where: str) -> Fields:
    """Return a message without what is null, its content a text, and the arguments of its calls objects.

    Raises EdgespecError for one without role, with content that is no text, or calls that are none.
    """
    found = {name: value for name, value in with_text(message, where).items() if value is not None}
    calls = found.pop("tool_calls", None) or [
        {"function": call} for call in (found.pop("function_call", None),) if call
    ]
    if not calls:
        return found
    if not isinstance(calls, list) or not all(_is_call(call) for call in calls):
        fix = 'Write "tool_calls": [{"type": "function", "function": {"name": NAME, "arguments": {}}}].'
        raise EdgespecError("E_PROMPT_INVALID", f"{where} has tool_calls that are no list of calls.", fix)
    return {**found, "tool_calls": [_with_arguments(call, _as_object) for call in calls]}


def _with_contents(chat: list[Fields]) -> list[Fields]:
    """Return the messages with an empty text where one only calls tools: some templates join it to others."""
    return [{"content": "", **message} for message in chat]


def _with_texts_of_arguments(chat: list[Fields]) -> list[Fields]:
    """Return the messages with the arguments of calls as JSON: some templates join them to texts."""
    return [
        {**message, "tool_calls": [_with_arguments(call, _as_json) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in chat
    ]


def _with_short_ids(chat: list[Fields]) -> list[Fields]:
    """Return the messages with ids of calls as Mistral's templates have them: nine letters and digits."""
    found = [dict(message) for message in chat]
    calls = [(message, "tool_call_id") for message in found if "tool_call_id" in message]
    for message in found:
        if "tool_calls" in message:
            message["tool_calls"] = [dict(call) for call in message["tool_calls"]]
            calls += [(call, "id") for call in message["tool_calls"]]
    for fields, name in calls:
        fields[name] = hashlib.blake2b(str(fields.get(name)).encode(errors="replace")).hexdigest()[:9]
    return found


def _as_json(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value


def _is_call(call: object) -> bool:
    if not isinstance(call, dict):
        return False
    function = call.get("function", call)
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _with_arguments(call: Fields, change: Callable[[Any], Any], **fields: Any) -> Fields:
    """Return a call with its function's arguments changed, and these fields; some write no key `function` around it."""
    function = call.get("function", call)
    if "arguments" in function:
        fields["arguments"] = change(function["arguments"])
    return {**call, "function": {**function, **fields}} if "function" in call else {**call, **fields}


def _as_object(value: Any) -> Any:
    """Return a call's arguments as an object, which OpenAI gives as JSON; anything else stays as it is."""
    try:
        read = parse_json(value.strip() or "{}") if isinstance(value, str) else value
    except ValueError:
        return value
    return read or {} if isinstance(read, dict) or read is None else value
