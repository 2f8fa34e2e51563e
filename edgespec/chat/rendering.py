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
) -> str:
    """Return the prompt up to where the next answer begins; the template reads `values` beside the messages.

    `developer` is `system` where the template loses or refuses it, and where a system message is refused its text
    goes before the first user's. Arguments of calls are JSON, and ids short, where others are refused. Raises
    EdgespecError where the template fails or leaves a message out: `first` is the number of the first one, 0 for a
    system prompt that was put before them.
    """
    values = values or {}
    check_choice(tokenizer, values)
    check_template_args(tokenizer, values)
    chat = [_readable(message, named(number, message)) for number, message in enumerate(messages, first)]
    found = _attempt(tokenizer, chat, values, first)
    for reshaped in (_with_contents, _with_texts_of_arguments, _with_short_ids):
        if found.is_refused and (other := reshaped(chat)) != chat:
            tried, chat = _attempt(tokenizer, other, values, first), other
            found = found if tried.is_refused else tried
    if found.error is not None and any(message["role"] == "developer" for message in chat):
        chat = [{**message, "role": "system"} if message["role"] == "developer" else message for message in chat]
        tried = _attempt(tokenizer, chat, values, first)
        found = tried if tried.error is None or tried.is_refused else found  # which names the role as it was given
    if found.is_refused and (folded := _folded(chat)):
        found = _attempt(tokenizer, folded, values, first + len(chat) - len(folded))
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
    return _attempt(tokenizer, chat, values or {}, 1).is_refused and not (
        _attempt(tokenizer, chat[1:], values or {}, 1).is_refused
    )


def _joined(parts: list[Any], where: str) -> str:
    """Return the content of a message in parts as one text, a part a line.

    Raises EdgespecError for parts that are images, sounds or anything else: only the text part of a model is run.
    """
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if isinstance(part, dict) and kind == "text" else None
        if not isinstance(text, str):
            what = f"of type '{kind}'" if isinstance(kind, str) else "without a type"
            raise EdgespecError(
                "E_PROMPT_INVALID", f"{where} has a part {what}, and only text is read.", "Keep the parts of type text."
            )
        texts.append(text)
    return "\n".join(texts)


def with_text(message: object, where: str) -> Fields:
    """Return a message with its content as one text, or None; raises EdgespecError without a role or a text."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise EdgespecError("E_PROMPT_INVALID", f'{where} has no "role".', MESSAGE_FIX)
    content = message.get("content")
    content = _joined(content, where) if isinstance(content, list) else content
    if content is not None and not isinstance(content, str):
        what = f'{where} has "content" {shown(content)}, which is no text.'
        raise EdgespecError("E_PROMPT_INVALID", what, MESSAGE_FIX)
    return {**message, "content": content}


def _writes_probe(tokenizer: PreTrainedTokenizerBase, chat: list[Fields], values: Mapping[str, Any]) -> bool:
    try:
        return PROBE in _applied(tokenizer, chat, values)
    except Exception:  # a template is a program of the model's: one that fails says why when it is used
        return False


def _attempt(tokenizer: PreTrainedTokenizerBase, chat: list[Fields], values: Mapping[str, Any], first: int) -> _Attempt:
    """Apply the template to texts, and to parts where it wants those and would lose a plain text."""
    found, probe = _applied_whole(tokenizer, chat, values, first), [{"role": "user", "content": PROBE}]
    if found.error is None or _writes_probe(tokenizer, probe, values):
        return found
    reads_parts = _writes_probe(tokenizer, _in_parts(probe), values)
    return _applied_whole(tokenizer, _in_parts(chat), values, first) if reads_parts else found


def _applied_whole(
    tokenizer: PreTrainedTokenizerBase, chat: list[Fields], values: Mapping[str, Any], first: int
) -> _Attempt:
    """Apply the template, and look for every message in what it writes."""
    try:
        text = _applied(tokenizer, chat, values)
    except Exception as error:  # a template is a program of the model's, and may raise anything
        roles = ", ".join(str(message["role"]) for message in chat)
        what = f"the model's chat template fails for messages of {roles if len(chat) < 9 else 'these roles'} ({error})."
        fix = "Give the messages and `template_args` that it asks for, another `chat_template`, or use `raw=True`."
        return _Attempt(error=EdgespecError("E_CHAT_TEMPLATE", what, fix), is_refused=True)
    lost = _lost(tokenizer, chat, values, text)
    if lost is None:
        return _Attempt(text=text)
    what = f"{named(first + lost, chat[lost])} does not reach the prompt: the model's chat template leaves it out."
    fix = f"Give it a role that the template knows, as {ROLES}; use a `chat_template` that writes it, or `raw=True`."
    return _Attempt(error=EdgespecError("E_PROMPT_INVALID", what, fix))


def _applied(tokenizer: PreTrainedTokenizerBase, chat: Sequence[Fields], values: Mapping[str, Any]) -> str:
    return str(tokenizer.apply_chat_template(list(chat), add_generation_prompt=True, tokenize=False, **values))


def _lost(tokenizer: PreTrainedTokenizerBase, chat: list[Fields], values: Mapping[str, Any], text: str) -> int | None:
    """Return the index of the first message that the text lacks; None where each is there.

    Templates may change what is said, as earlier reasoning that they cut off. So unless all texts stand there one
    after the other, the template is given marks in their place, and those are looked for.
    """
    if _stand_in_order(text, chat):
        return None
    marks = [f"{PROBE}{index:04d}" for index in range(len(chat))]
    try:
        marked = _applied(tokenizer, [_marked(*pair) for pair in zip(chat, marks, strict=True)], values)
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
    content = message.get("content") or ()
    texts = [content] if isinstance(content, str) else [part["text"] for part in content]
    return bool(message.get("tool_calls")) or any(text.strip() for text in texts)


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
    texts = [str(message.get("content") or "") for message in chat[: start + 1]]
    return [{**chat[start], "content": "\n\n".join(text for text in texts if text.strip())}, *chat[start + 1 :]]


def _in_parts(chat: Sequence[Fields]) -> list[Fields]:
    """Return the messages with their texts as parts; a message that only calls tools has none."""
    found = [dict(message) for message in chat]
    for message in found:
        text = message.get("content")
        if text is not None:
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
