"""OpenAI's responses, without a memory of them: a body becomes a job, and its events the events that clients read.

This is what Codex asks for. Each request brings the whole conversation, whose rows the engine has kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing
from typing import Any

from edgespec.serve.answer import Parts
from edgespec.serve.chat import AnswerDelta, AnswerEnded, ChatJob, ChatTexts
from edgespec.serve.field_table import RESPONSES
from edgespec.serve.openai_schema import new_id, now_s, timings
from edgespec.serve.refusal import refusal_of
from edgespec.serve.request_fields import UnusedFields, read_fields
from edgespec.serve.request_queue import PromptProgress, RequestQueue, TextFailed
from edgespec.serve.response_items import WrittenItems
from edgespec.serve.responses_body import ResponsesBody
from edgespec.text.results import GenerationResult


class ResponseAnswer:
    """One request's answer, streamed or whole."""

    def __init__(self, alias: str, body: ResponsesBody, chat: ChatTexts, job: ChatJob) -> None:
        self._chat = chat
        honoured = body.model_dump(
            include={"instructions", "max_output_tokens", "parallel_tool_calls", "temperature", "top_p", "truncation"}
        )
        choice = body.tool_choice
        self._head = {
            "id": new_id("resp"), "object": "response", "created_at": now_s(), "model": alias, **honoured,
            "background": False, "error": None, "incomplete_details": None, "metadata": {}, "store": False,
            "previous_response_id": None, "reasoning": {"effort": body.reasoning.effort, "summary": None},
            "text": {"format": body.text.format.model_dump(by_alias=True, exclude_none=True)},
            "tools": [{"type": "function", "strict": None, **tool["function"]} for tool in job.toolset.seen],
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        }  # fmt: skip

    async def chunks(self) -> Parts:
        """Yield the events of a stream, which are numbered."""
        number = 0
        async with aclosing(self._events()) as events:
            async for event in events:
                if isinstance(event, Mapping):
                    event, number = {**event, "sequence_number": number}, number + 1
                yield event

    async def _events(self) -> Parts:
        begun = {**self._head, "status": "in_progress", "output": [], "usage": None}
        yield {"type": "response.created", "response": begun}
        yield {"type": "response.in_progress", "response": begun}
        output = WrittenItems()
        async with aclosing(self._chat.events()) as events:
            async for event in events:
                match event:
                    case PromptProgress():
                        yield event
                    case AnswerDelta(part=part):
                        for written in output.add(part):
                            yield written
                    case AnswerEnded(result=result, reason=reason, num_thought=num_thought):
                        ended = self._ended(result, reason, num_thought)
                        for written in output.close(status=ended["status"]):
                            yield written
                        yield {"type": f"response.{ended['status']}", "response": {**ended, "output": output.items}}
                    case TextFailed(error=error):
                        refusal = refusal_of(error)
                        what = {"code": "server_error", "message": refusal.message}
                        failed = {**begun, "status": "failed", "output": output.items, "error": what}
                        yield {"type": "response.failed", "response": failed}

    async def whole(self) -> Mapping[str, Any]:
        """Return the answer when it has ended; raises what ended it early."""
        (answer,) = await self._chat.answers()
        output = WrittenItems()
        for part in answer.parts:
            for _ in output.add(part):
                pass
        ended = self._ended(answer.result, answer.reason, answer.num_thought)
        for _ in output.close(status=ended["status"]):
            pass
        return {**ended, "output": output.items}

    def _ended(self, result: GenerationResult, reason: str, num_thought: int) -> dict[str, Any]:
        is_cut = reason == "length"
        read, made = result.prompt_tokens, len(result.token_ids)
        usage = {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": result.cached_tokens},
            "output_tokens": made,
            "output_tokens_details": {"reasoning_tokens": num_thought},
            "total_tokens": read + made,
        }
        return {
            **self._head,
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": usage,
            "timings": timings([result]),
        }


async def response(
    queue: RequestQueue, alias: str, fields: Mapping[str, Any], unused: UnusedFields
) -> tuple[ResponseAnswer, bool]:
    """Return an answer that has not begun, and whether it is streamed; raises RefusalError and EdgespecError."""
    body = read_fields(ResponsesBody, RESPONSES, fields, unused)
    job = body.job(unused)
    return ResponseAnswer(alias, body, await ChatTexts.open(queue, job, unused), job), body.stream
