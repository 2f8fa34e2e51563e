"""Anthropic's messages: a body becomes a job, and its events the named events that clients read."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from edgespec.inputs import shown
from edgespec.serve.answer import Parts
from edgespec.serve.body import fields_of
from edgespec.serve.desk import Desk, Ended, Failed, Job, Piece, Progress, results_of
from edgespec.serve.openai_form import new_id, timings
from edgespec.serve.refusal import (
    BAD_REQUEST,
    FORBIDDEN,
    NOT_FOUND,
    TOO_LARGE,
    TOO_MANY,
    UNAUTHORIZED,
    UNAVAILABLE,
    RefusalError,
    refusal_of,
)  # fmt: skip
from edgespec.text.request import TextOptions, TextRequest
from edgespec.text.results import GenerationResult

DESCRIBING = frozenset({"metadata", "service_tier"})
_KINDS = {
    BAD_REQUEST: "invalid_request_error", UNAUTHORIZED: "authentication_error", FORBIDDEN: "permission_error",
    NOT_FOUND: "not_found_error", TOO_LARGE: "request_too_large", TOO_MANY: "rate_limit_error",
    UNAVAILABLE: "overloaded_error",
}  # fmt: skip


class CountedBody(BaseModel):
    """The fields of a prompt."""

    model_config = ConfigDict(extra="forbid")

    model: str = ""  # one model is served, whatever clients call it
    messages: list[dict[str, Any]] = Field(min_length=1)
    system: str | list[dict[str, Any]] | None = None

    def prompt(self) -> list[dict[str, Any]]:
        """Return the messages as chat templates read them; raises RefusalError for parts that are no text."""
        said = [] if not self.system else [{"role": "system", "content": _text(self.system, "system")}]
        for number, message in enumerate(self.messages):
            place = f"messages.{number}"
            if message.get("role") not in {"user", "assistant", "system"} or set(message) - {"role", "content"}:
                raise RefusalError(BAD_REQUEST, f"'{place}' is no message of user or assistant.", field=place)
            said.append({"role": message["role"], "content": _text(message.get("content"), f"{place}.content")})
        return said


class MessagesBody(CountedBody):
    """The fields of a message that are honoured."""

    max_tokens: int = Field(ge=1)
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] = Field(default_factory=list)

    def job(self) -> Job:
        """Return what is to be written; raises RefusalError."""
        options: TextOptions = {"max_new_tokens": self.max_tokens}
        if self.temperature is not None:
            options["temperature"] = self.temperature
        if self.top_p is not None:
            options["top_p"] = self.top_p
        if self.top_k is not None:
            options["top_k"] = self.top_k
        if self.stop_sequences:
            options["stop"] = self.stop_sequences
        return Job(prompts=[self.prompt()], options=options)


class MessageAnswer:
    """One request's answer, streamed or whole."""

    def __init__(self, alias: str, desk: Desk, requests: list[TextRequest]) -> None:
        self._desk, self._requests = desk, requests
        self._head = {"id": new_id("msg"), "type": "message", "role": "assistant", "model": alias}

    async def chunks(self) -> Parts:
        """Yield the events of a stream."""
        read = {"input_tokens": len(self._requests[0].ids), "output_tokens": 0}
        yield {"type": "message_start", "message": {**self._head, **_ending(None), "content": [], "usage": read}}
        yield {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        async with aclosing(self._desk.events(self._requests)) as events:
            async for event in events:
                match event:
                    case Progress():
                        yield {"type": "ping"}
                    case Piece(chunk=chunk):
                        if chunk.text:
                            delta = {"type": "text_delta", "text": chunk.text}
                            yield {"type": "content_block_delta", "index": 0, "delta": delta}
                    case Ended(result=result):
                        yield {"type": "content_block_stop", "index": 0}
                        yield {"type": "message_delta", "delta": _ending(result), "usage": _usage(result)}
                        yield {"type": "message_stop"}
                    case Failed(error=error):
                        yield error_body(refusal_of(error))

    async def whole(self) -> Mapping[str, Any]:
        """Return the answer when it has ended; raises what ended it early."""
        (result,) = await results_of(self._desk.events(self._requests))
        content = [{"type": "text", "text": result.text}]
        ending = {**_ending(result), "usage": _usage(result), "timings": timings([result])}
        return {**self._head, "content": content, **ending}


async def message(desk: Desk, alias: str, given: Mapping[str, Any]) -> tuple[MessageAnswer, bool]:
    """Return an answer that has not begun, and whether it is streamed; raises RefusalError and EdgespecError."""
    body = fields_of(MessagesBody, given, describing=DESCRIBING)
    return MessageAnswer(alias, desk, await desk.requests(body.job())), body.stream


async def count_tokens(desk: Desk, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the number of tokens of a prompt; raises RefusalError and EdgespecError."""
    body = fields_of(CountedBody, given, describing=DESCRIBING)
    return {"input_tokens": await desk.count(body.prompt())}


def error_body(refusal: RefusalError) -> dict[str, Any]:
    """Return an error in Anthropic's form."""
    kind = _KINDS.get(refusal.status, "invalid_request_error" if refusal.status < UNAVAILABLE - 3 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": refusal.message}}


def _text(content: Any, place: str) -> str:
    """Return a content as one text; raises RefusalError for blocks of another kind, which would be lost."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RefusalError(BAD_REQUEST, f"'{place}' is {shown(content)}, and no text.", field=place)
    texts = []
    for number, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind != "text" or not isinstance(block.get("text"), str):
            what = f"'{place}.{number}' is of type {shown(kind)}, and only text is read."
            raise RefusalError(BAD_REQUEST, what, field=f"{place}.{number}")
        texts.append(block["text"])
    return "\n".join(texts)


def _ending(result: GenerationResult | None) -> dict[str, Any]:
    """Return why a text ended: with a result also which of the request's strings did it, where one did."""
    if result is None:
        return {"stop_reason": None, "stop_sequence": None}
    reason = "end_turn" if result.finish_reason == "stop" else "max_tokens"
    return {"stop_reason": reason, "stop_sequence": None}


def _usage(result: GenerationResult) -> dict[str, int]:
    cached = result.cached_tokens
    read = result.prompt_tokens - cached
    return {"input_tokens": read, "cache_read_input_tokens": cached, "output_tokens": len(result.token_ids)}
