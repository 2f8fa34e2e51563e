"""Anthropic's messages as chat templates read them: blocks become texts, calls, and results of tools."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from edgespec.serve.refusal import BAD_REQUEST, RefusalError
from edgespec.validation import shown

Blocks = str | Sequence[Mapping[str, Any]]
ROLES = ("user", "assistant", "system")
MESSAGE_FIELDS = {"role", "content"}
# What a block may say; citations, signatures and callers describe it, and its rows are kept in any case
BLOCK_FIELDS = {
    "text": {"text", "citations", "cache_control"},
    "thinking": {"thinking", "signature"},
    "redacted_thinking": {"data"},
    "tool_use": {"id", "name", "input", "caller", "cache_control"},
    "tool_result": {"tool_use_id", "content", "is_error", "cache_control"},
}


def messages_of(system: Blocks | None, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages; raises RefusalError for a role or a block that is not read."""
    found = [{"role": "system", "content": _joined(system, "system")}] if system else []
    for number, message in enumerate(messages):
        location, role = f"messages.{number}", message.get("role")
        _check_known(message, MESSAGE_FIELDS, location)
        if role not in ROLES:
            raise _refused(f"{location}.role", f"is {shown(role)}, and none of {', '.join(ROLES)}")
        found += _messages(str(role), message.get("content"), f"{location}.content")
    return found


def _messages(role: str, content: Any, location: str) -> Iterator[dict[str, Any]]:
    """Yield the messages that one message's blocks are: results of tools stand alone, before the user's own words."""
    texts, thoughts, calls = [], [], []
    for where, block in _blocks(content, location):
        match block.get("type"):
            case "text":
                texts.append(_text(block, "text", where))
            case "thinking" if role == "assistant":
                thoughts.append(_text(block, "thinking", where))
            case "redacted_thinking" if role == "assistant":
                continue  # nobody here can read it
            case "tool_use" if role == "assistant":
                function = {"name": _text(block, "name", where), "arguments": block.get("input") or {}}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case "tool_result" if role == "user":
                yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": _result(block, where)}
            case other:
                raise _refused(where, f"is of type {shown(other)}, which is not read in a message of {role}")
    if not (texts or calls) and role == "user":
        return
    message: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    yield {**message, "tool_calls": calls} if calls else message


def _result(block: Mapping[str, Any], location: str) -> str:
    """Return a tool's result as one text; templates have no place for a failure, so that the text says it."""
    found, has_failed = _joined(block.get("content") or "", f"{location}.content"), block.get("is_error")
    if not isinstance(has_failed, bool | None):
        raise _refused(f"{location}.is_error", f"is {shown(has_failed)}, and neither true nor false")
    return f"Error: {found}" if has_failed and not found.startswith("Error") else found


def _joined(content: Blocks, location: str) -> str:
    """Return blocks of text as one text."""
    texts = []
    for where, block in _blocks(content, location):
        if block.get("type") != "text":
            raise _refused(where, f"is of type {shown(block.get('type'))}, and only text is read")
        texts.append(_text(block, "text", where))
    return "\n".join(texts)


def _blocks(content: Any, location: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if isinstance(content, str):
        yield location, {"type": "text", "text": content}
    elif isinstance(content, list) and all(isinstance(block, Mapping) for block in content):
        for number, block in enumerate(content):
            fields = BLOCK_FIELDS.get(str(block.get("type")))
            if fields is not None:  # other types are refused by name
                _check_known(block, fields | {"type"}, f"{location}.{number}")
            yield f"{location}.{number}", block
    else:
        raise _refused(location, f"is {shown(content)}, and neither a text nor blocks")


def _check_known(fields: Mapping[str, Any], known: Set[str], location: str) -> None:
    """Raise RefusalError for the first field that is not read."""
    unknown = next((name for name in fields if name not in known), None)
    if unknown is not None:
        raise _refused(f"{location}.{unknown}", "is not a field that is read here")


def _text(block: Mapping[str, Any], name: str, location: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise _refused(f"{location}.{name}", f"is {shown(value)}, and no text")
    return value


def _refused(location: str, what: str) -> RefusalError:
    return RefusalError(BAD_REQUEST, f"'{location}' {what}.", field=location)
