"""Anthropic's messages: a body becomes a job, and its events the named events that clients read."""

import json
from collections.abc import Iterator, Mapping
from contextlib import aclosing
from typing import Any

from edgespec.chat.answer import AnswerPart
from edgespec.chat.tools import call_id
from edgespec.serve.answer import Parts
from edgespec.serve.anthropic_body import CountedBody, MessagesBody
from edgespec.serve.chat import AnswerDelta, AnswerEnded, ChatTexts, Reason
from edgespec.serve.field_table import MESSAGES
from edgespec.serve.openai_schema import image_tokens, new_id, timings
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
from edgespec.serve.request_fields import UnusedFields, read_fields
from edgespec.serve.request_queue import PromptProgress, RequestQueue, TextFailed
from edgespec.serve.served_model import ServedModel
from edgespec.text.results import GenerationResult

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "calls": "tool_use"}
_KINDS = {
    BAD_REQUEST: "invalid_request_error", UNAUTHORIZED: "authentication_error", FORBIDDEN: "permission_error",
    NOT_FOUND: "not_found_error", TOO_LARGE: "request_too_large", TOO_MANY: "rate_limit_error",
    UNAVAILABLE: "overloaded_error",
}  # fmt: skip


class MessageAnswer:
    """One request's answer, streamed or whole."""

    def __init__(self, alias: str, chat: ChatTexts) -> None:
        self._chat = chat
        self._head = {"id": new_id("msg"), "type": "message", "role": "assistant", "model": alias}

    async def chunks(self) -> Parts:
        """Yield the events of a stream: a block for each part of the answer."""
        begun = _numbers(len(self._chat.requests[0].ids), 0, 0)
        yield {"type": "message_start", "message": {**self._head, **_NO_ENDING, "content": [], "usage": begun}}
        number, kind = -1, ""
        async with aclosing(self._chat.events()) as events:
            async for event in events:
                match event:
                    case PromptProgress():
                        yield {"type": "ping"}
                    case AnswerDelta(part=part):
                        if part.kind != kind or part.call is not None:
                            for written in _closed(number, kind):
                                yield written
                            number, kind = number + 1, part.kind
                            yield {"type": "content_block_start", "index": number, "content_block": _empty(part)}
                        yield {"type": "content_block_delta", "index": number, "delta": _delta(part)}
                    case AnswerEnded(result=result, reason=reason):
                        for written in _closed(number, kind):
                            yield written
                        yield {"type": "message_delta", "delta": _ending(reason, result), "usage": _usage(result)}
                        yield {"type": "message_stop"}
                    case TextFailed(error=error):
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
        ending = {
            **_ending(answer.reason, answer.result),
            "usage": _usage(answer.result),
            "timings": timings([answer.result]),
        }
        return {**self._head, "content": content, **ending}


async def message(
    queue: RequestQueue, model: ServedModel, fields: Mapping[str, Any], unused: UnusedFields
) -> tuple[MessageAnswer, bool]:
    """Return an answer that has not begun, and whether it is streamed; raises RefusalError and EdgespecError."""
    body = read_fields(MessagesBody, MESSAGES, fields, unused)
    job = model.of(body.job(unused), body.lora)
    return MessageAnswer(model.name, await ChatTexts.open(queue, job, unused)), body.stream


async def count_tokens(queue: RequestQueue, fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the number of tokens of a prompt; raises RefusalError and EdgespecError."""
    unused = UnusedFields(queue.say_once)
    body = read_fields(CountedBody, MESSAGES, fields, unused)
    chat = await ChatTexts.open(queue, body.job(unused), unused)
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
_NO_ENDING = {"stop_reason": None, "stop_sequence": None}


def _delta(part: AnswerPart) -> dict[str, Any]:
    if part.call is not None:
        return {"type": "input_json_delta", "partial_json": part.call.arguments}
    field = _FIELDS[part.kind]
    return {"type": f"{field}_delta", field: part.text}


def _ending(reason: Reason, result: GenerationResult) -> dict[str, Any]:
    """Return why a message ended; calls count above the string that was written after them."""
    string = result.stop_string if reason == "stop" else None
    return {"stop_reason": "stop_sequence" if string else STOP_REASONS[reason], "stop_sequence": string}


def _closed(number: int, kind: str) -> Iterator[dict[str, Any]]:
    """Yield the events that end a block, if there is one; a thought is signed first, though nobody checks that here."""
    if kind == "reasoning":
        signature = {"type": "signature_delta", "signature": ""}
        yield {"type": "content_block_delta", "index": number, "delta": signature}
    if kind:
        yield {"type": "content_block_stop", "index": number}


def _usage(result: GenerationResult) -> dict[str, int]:
    numbers = _numbers(result.prompt_tokens, result.cached_tokens, len(result.token_ids))
    return {**numbers, **image_tokens(result.image_tokens)}


def _numbers(num_prompt: int, num_cached: int, num_made: int) -> dict[str, int]:
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": num_cached}
    return {"input_tokens": num_prompt - num_cached, **cached, "output_tokens": num_made}
