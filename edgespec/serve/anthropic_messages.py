"""Anthropic's messages: a body becomes a job, and its events the named events that clients read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any, Literal

from pydantic import Field

from edgespec.serve.answer import Parts
from edgespec.serve.anthropic_prompt import messages_of
from edgespec.serve.body import Fields, Items, fields_of
from edgespec.serve.chat import ChatJob, ChatTexts, Finished, Said, call_id, chosen_tools
from edgespec.serve.desk import Desk, Failed, Progress
from edgespec.serve.openai_form import MAX_STOPS, new_id, timings
from edgespec.serve.refusal import (
    BAD_REQUEST,
    BROKEN,
    FORBIDDEN,
    NOT_FOUND,
    TOO_LARGE,
    TOO_MANY,
    UNAUTHORIZED,
    UNAVAILABLE,
    RefusalError,
    refusal_of,
)
from edgespec.text.answer import AnswerPart
from edgespec.text.request import TextOptions
from edgespec.text.results import GenerationResult

DESCRIBING = frozenset({"metadata", "service_tier", "cache_control"})
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "calls": "tool_use"}
_KINDS = {
    BAD_REQUEST: "invalid_request_error", UNAUTHORIZED: "authentication_error", FORBIDDEN: "permission_error",
    NOT_FOUND: "not_found_error", TOO_LARGE: "request_too_large", TOO_MANY: "rate_limit_error",
    UNAVAILABLE: "overloaded_error",
}  # fmt: skip


class Tool(Fields):
    """A tool that the client runs."""

    type: Literal["custom"] = "custom"
    name: str = Field(min_length=1)
    description: str | None = None
    input_schema: dict[str, Any]
    cache_control: dict[str, Any] | None = None  # rows are kept in any case

    def for_template(self) -> dict[str, Any]:
        """Return it in the form that chat templates read."""
        described = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": self.input_schema}}


class ToolChoice(Fields):
    """Whether a tool has to be called."""

    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Fields):
    """Whether the model is to think first; how long is its own affair."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


class CountedBody(Fields):
    """The fields of a prompt."""

    model: str = ""  # one model is served, whatever clients call it
    messages: Items[dict[str, Any]] = Field(min_length=1)
    system: str | Items[dict[str, Any]] | None = None
    tools: Items[Tool] = Field(default_factory=list)
    tool_choice: ToolChoice = ToolChoice()
    thinking: Thinking | None = None

    def job(self, desk: Desk, options: TextOptions) -> ChatJob:
        """Return what is to be written; raises RefusalError for content that is not read."""
        tools = [tool.for_template() for tool in self.tools]
        choice = {"any": "required", "tool": "named"}.get(self.tool_choice.type, self.tool_choice.type)
        seen, forced = chosen_tools(tools, choice, self.tool_choice.name)
        template = str(desk.engine.pair.tokenizer.chat_template or "")
        values = {}
        if self.thinking is not None and "enable_thinking" in template:
            values["enable_thinking"] = self.thinking.type != "disabled"
        return ChatJob(
            prompts=[messages_of(self.system, self.messages)],
            options=options,
            template_values=values,
            tools=seen,
            forced=forced,
            has_one_call=choice == "named" or self.tool_choice.disable_parallel_tool_use,
        )


class MessagesBody(CountedBody):
    """The fields of a message that are honoured."""

    max_tokens: int = Field(ge=1)
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: Items[str] = Field(default_factory=list, max_length=MAX_STOPS)

    def text_options(self) -> TextOptions:
        """Return the options of the text."""
        options: TextOptions = {"max_new_tokens": self.max_tokens}
        if self.temperature is not None:
            options["temperature"] = self.temperature
        if self.top_p is not None:
            options["top_p"] = self.top_p
        if self.top_k is not None:
            options["top_k"] = self.top_k
        if self.stop_sequences:
            options["stop"] = self.stop_sequences
        return options


class MessageAnswer:
    """One request's answer, streamed or whole."""

    def __init__(self, alias: str, chat: ChatTexts) -> None:
        self._chat = chat
        self._head = {"id": new_id("msg"), "type": "message", "role": "assistant", "model": alias}

    async def chunks(self) -> Parts:
        """Yield the events of a stream: a block for each part of the answer."""
        read = {"input_tokens": len(self._chat.requests[0].ids), "output_tokens": 0}
        yield {"type": "message_start", "message": {**self._head, **_ending(None), "content": [], "usage": read}}
        number, kind = -1, ""
        async with aclosing(self._chat.events()) as events:
            async for event in events:
                match event:
                    case Progress():
                        yield {"type": "ping"}
                    case Said(part=part):
                        if part.kind != kind or part.call is not None:
                            if kind:
                                yield {"type": "content_block_stop", "index": number}
                            number, kind = number + 1, part.kind
                            yield {"type": "content_block_start", "index": number, "content_block": _empty(part)}
                        yield {"type": "content_block_delta", "index": number, "delta": _delta(part)}
                    case Finished(result=result, reason=reason):
                        if kind:
                            yield {"type": "content_block_stop", "index": number}
                        yield {"type": "message_delta", "delta": _ending(reason), "usage": _usage(result)}
                        yield {"type": "message_stop"}
                    case Failed(error=error):
                        yield error_body(refusal_of(error))

    async def whole(self) -> Mapping[str, Any]:
        """Return the answer when it has ended; raises what ended it early."""
        (answer,) = await self._chat.answers()
        content: list[dict[str, Any]] = []
        for part in answer.parts:
            if part.call is None and content and content[-1]["type"] == _empty(part)["type"]:
                content[-1][_FIELDS[part.kind]] += part.text
            elif part.call is None:
                content.append({**_empty(part), _FIELDS[part.kind]: part.text})
            else:
                content.append({**_empty(part), "input": json.loads(part.call.arguments)})
        ending = {**_ending(answer.reason), "usage": _usage(answer.result), "timings": timings([answer.result])}
        return {**self._head, "content": content, **ending}


async def message(desk: Desk, alias: str, given: Mapping[str, Any]) -> tuple[MessageAnswer, bool]:
    """Return an answer that has not begun, and whether it is streamed; raises RefusalError and EdgespecError."""
    body = fields_of(MessagesBody, given, describing=DESCRIBING)
    return MessageAnswer(alias, await ChatTexts.open(desk, body.job(desk, body.text_options()))), body.stream


async def count_tokens(desk: Desk, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the number of tokens of a prompt; raises RefusalError and EdgespecError."""
    body = fields_of(CountedBody, given, describing=DESCRIBING)
    chat = await ChatTexts.open(desk, body.job(desk, {"max_new_tokens": 1}))
    return {"input_tokens": len(chat.requests[0].ids)}


def error_body(refusal: RefusalError) -> dict[str, Any]:
    """Return an error in Anthropic's form."""
    kind = _KINDS.get(refusal.status, "invalid_request_error" if refusal.status < BROKEN else "api_error")
    return {"type": "error", "error": {"type": kind, "message": refusal.message}}


_FIELDS = {"content": "text", "reasoning": "thinking"}  # of the block of a part


def _empty(part: AnswerPart) -> dict[str, Any]:
    """Return the block of a part before it is filled."""
    if part.call is not None:
        return {"type": "tool_use", "id": call_id("toolu"), "name": part.call.name, "input": {}}
    return {"type": "thinking", "thinking": "", "signature": ""} if part.kind == "reasoning" else _EMPTY_TEXT.copy()


_EMPTY_TEXT = {"type": "text", "text": ""}


def _delta(part: AnswerPart) -> dict[str, Any]:
    if part.call is not None:
        return {"type": "input_json_delta", "partial_json": part.call.arguments}
    field = _FIELDS[part.kind]
    return {"type": f"{field}_delta", field: part.text}


def _ending(reason: str | None) -> dict[str, Any]:
    return {"stop_reason": None if reason is None else STOP_REASONS[reason], "stop_sequence": None}


def _usage(result: GenerationResult) -> dict[str, int]:
    cached = result.cached_tokens
    read = result.prompt_tokens - cached
    return {"input_tokens": read, "cache_read_input_tokens": cached, "output_tokens": len(result.token_ids)}
