"""The items of a response as OpenAI has them: what is thought, what is said, and calls."""

from collections.abc import Iterator, Mapping
from typing import Any

from edgespec.chat.answer import AnswerPart, ToolCall
from edgespec.chat.tools import call_id


class WrittenItems:
    """The items of an answer while they are written, and the events that say so."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._is_open = False

    def add(self, part: AnswerPart) -> Iterator[dict[str, Any]]:
        """Take a part of the answer; yields its events."""
        kind = {"content": "message", "reasoning": "reasoning", "call": "function_call"}[part.kind]
        if not self._is_open or self.items[-1]["type"] != kind or part.call is not None:
            yield from self.close()
            yield from self._begun(_empty(part))
        item, at = self.items[-1], self._at()
        if part.call is not None:
            item["arguments"] = part.call.arguments
            yield {"type": "response.function_call_arguments.delta", **at, "delta": part.call.arguments}
            return
        item["content"][0]["text"] += part.text
        yield {
            "type": f"response.{item['content'][0]['type']}.delta",
            **at,
            **_FIRST,
            "delta": part.text,
            **_logs(item),
        }

    def _begun(self, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self.items.append(item)
        self._is_open = True
        shown = {**item, "content": []} if "content" in item else item
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": shown}
        if "content" in item:
            yield {"type": "response.content_part.added", **self._at(), **_FIRST, "part": dict(item["content"][0])}

    def close(self, *, status: str = "completed") -> Iterator[dict[str, Any]]:
        """End the item that is open; yields its events."""
        if not self._is_open:
            return
        self._is_open = False
        item, at = self.items[-1], self._at()
        item["status"] = status
        if "content" in item:
            (part,) = item["content"]
            yield {"type": f"response.{part['type']}.done", **at, **_FIRST, "text": part["text"], **_logs(item)}
            yield {"type": "response.content_part.done", **at, **_FIRST, "part": part}
        else:
            call = {"name": item["name"], "arguments": item["arguments"]}
            yield {"type": "response.function_call_arguments.done", **at, **call}
        yield {"type": "response.output_item.done", "output_index": at["output_index"], "item": item}

    def _at(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}


def items_of(message: Mapping[str, Any], status: str) -> list[dict[str, Any]]:
    """Return the items of a whole message as chat completions write it; the last one ended with this status."""
    written = WrittenItems()
    parts = [AnswerPart(kind="reasoning", text=message.get("reasoning_content") or "")]
    parts += [AnswerPart(kind="content", text=message.get("content") or "")]
    parts += [AnswerPart(kind="call", call=ToolCall(**call["function"])) for call in message.get("tool_calls") or []]
    for part in parts:
        if not part.text and part.call is None:
            continue
        for _ in written.add(part):
            pass
    for _ in written.close(status=status):
        pass
    return written.items


_FIRST = {"content_index": 0}  # an item has one part


def _logs(item: Mapping[str, Any]) -> dict[str, Any]:
    return {"logprobs": []} if item["type"] == "message" else {}


def _empty(part: AnswerPart) -> dict[str, Any]:
    """Return the item of a part before it is filled."""
    if part.call is not None:
        call = {"call_id": call_id("call"), "name": part.call.name, "arguments": ""}
        return {"id": call_id("fc"), "type": "function_call", "status": "in_progress", **call}
    if part.kind == "reasoning":
        thought = {"type": "reasoning_text", "text": ""}
        return {"id": call_id("rs"), "type": "reasoning", "status": "in_progress", "summary": [], "content": [thought]}
    content = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    return {"id": call_id("msg"), "type": "message", "status": "in_progress", "role": "assistant", "content": [content]}
