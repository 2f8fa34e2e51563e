"""The input of OpenAI's responses as chat templates read it: items become messages, calls, and results of tools."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from edgespec.chat.picture_parts import is_picture
from edgespec.serve.refusal import BAD_REQUEST, RefusalError
from edgespec.validation import shown

LOGPROBS = "message.output_text.logprobs"  # what `include` may ask for and a text could have
ROLES = ("user", "assistant", "system", "developer")
# Types of parts that are text
TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")
Items = str | Sequence[Mapping[str, Any]]


def messages_of(instructions: str | None, sent: Items) -> list[dict[str, Any]]:
    """Return the messages; raises RefusalError for an item that is not read.

    What stands before the first turn is one system message: many templates read no second one.
    """
    found = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(sent, str):
        return [*found, {"role": "user", "content": sent}]
    for message in _messages(sent):
        is_words = isinstance(message["content"], str) and message["role"] in ("system", "developer")
        is_leading = len(found) == 1 and found[0]["role"] == "system" and is_words
        if is_leading:
            found = [{"role": "system", "content": f"{found[0]['content']}\n\n{message['content']}"}]
        else:
            found.append(message)
    return found


def added_tools(sent: Items) -> list[Mapping[str, Any]]:
    """Return the tools that stand among the items, beside those of the request."""
    items = [] if isinstance(sent, str) else sent
    return [tool for item in items if item.get("type") == "additional_tools" for tool in item.get("tools") or []]


def functions(tools: Sequence[tuple[str, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return functions, each with its place in the body, as templates read them."""
    found = []
    for location, tool in tools:
        if not isinstance(tool.get("name"), str):
            raise RefusalError(BAD_REQUEST, f"'{location}' has no name.", field=f"{location}.name")
        if not isinstance(tool.get("strict"), bool | None):
            what = f"'{location}.strict' is {shown(tool['strict'])}, and neither true nor false."
            raise RefusalError(BAD_REQUEST, what, field=f"{location}.strict")
        kept = {key: tool[key] for key in ("name", "description", "parameters", "strict") if tool.get(key) is not None}
        found.append({"type": "function", "function": {"parameters": {"type": "object", "properties": {}}, **kept}})
    return found


def _messages(items: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the messages of items: thoughts, words and calls that follow each other are one message."""
    answer: dict[str, Any] | None = None  # of the model, to which more may belong
    for number, item in enumerate(items):
        location, kind = f"input.{number}", item.get("type", "message")
        is_answer = kind == "message" and item.get("role") == "assistant"
        belongs = kind in ("reasoning", "function_call") or (is_answer and answer is not None and not answer["content"])
        if answer is not None and (not belongs or (kind == "reasoning" and (answer["content"] or _calls(answer)))):
            yield answer
            answer = None
        if belongs or is_answer:
            answer = {"role": "assistant", "content": ""} if answer is None else answer
        match kind:
            case "message" if is_answer and answer is not None:
                answer["content"] = _text(item.get("content"), f"{location}.content")
            case "message":
                yield {"role": _role(item, location), "content": _content(item.get("content"), f"{location}.content")}
            case "reasoning" if answer is not None:
                thoughts = _text(item.get("content") or item.get("summary") or "", f"{location}.content")
                answer |= {"reasoning_content": thoughts} if thoughts else {}  # encrypted ones nobody here can read
            case "function_call" if answer is not None:
                function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
                answer.setdefault("tool_calls", []).append(
                    {"id": item.get("call_id"), "type": "function", "function": function}
                )
            case "function_call_output":
                output = _content(item.get("output") or "", f"{location}.output")
                yield {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
            case "additional_tools":
                continue
            case other:
                raise _refused(location, f"is of type {shown(other)}, which is not read")
    if answer is not None:
        yield answer


def _calls(answer: Mapping[str, Any]) -> bool:
    return bool(answer.get("tool_calls"))


def _role(item: Mapping[str, Any], location: str) -> str:
    role = item.get("role")
    if role not in ROLES:
        raise _refused(f"{location}.role", f"is {shown(role)}, and none of {', '.join(ROLES)}")
    return str(role)


def _content(content: Any, location: str) -> str | list[Mapping[str, Any]]:
    """Return a text, or parts where pictures are among them."""
    if not isinstance(content, list) or not any(map(is_picture, content)):
        return _text(content, location)
    return [
        part if is_picture(part) else {"type": "text", "text": _text([part], f"{location}.{number}")}
        for number, part in enumerate(content)
    ]


def _text(content: Any, location: str) -> str:
    """Return a text, or parts of text as one."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, Mapping) for part in content):
        raise _refused(location, f"is {shown(content)}, and neither a text nor parts")
    texts = []
    for number, part in enumerate(content):
        value = part.get("refusal" if part.get("type") == "refusal" else "text")
        if part.get("type") not in TEXTS or not isinstance(value, str):
            what = f"is of type {shown(part.get('type'))}, and only text and input_image are read"
            raise _refused(f"{location}.{number}", what)
        texts.append(value)
    return "\n".join(texts)


def _refused(location: str, what: str) -> RefusalError:
    return RefusalError(BAD_REQUEST, f"'{location}' {what}.", field=location)
