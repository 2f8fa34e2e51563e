"""OpenAI's chat completions: a body becomes a job, and its events the chunks that clients read."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing
from typing import Any

from pydantic import Field

from edgespec.serve.answer import Parts
from edgespec.serve.body import fields_of
from edgespec.serve.desk import Desk, Ended, Failed, Job, Piece, Progress, results_of
from edgespec.serve.openai_form import (
    DESCRIBING,
    LogprobCount,
    SamplingFields,
    error_body,
    finish_reason,
    new_id,
    now_s,
    timings,
    usage,
)  # fmt: skip
from edgespec.serve.refusal import BAD_REQUEST, RefusalError, refusal_of
from edgespec.text.logprob_entries import logprob_fields
from edgespec.text.request import TextOptions, TextRequest
from edgespec.text.results import GenerationResult


class ChatBody(SamplingFields):
    """The fields of a chat completion that are honoured."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = LogprobCount
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    reasoning_effort: str | None = None  # for templates that read it

    def job(self) -> Job:
        """Return what is to be written; raises RefusalError for fields that contradict each other."""
        options: TextOptions = self.text_options()
        length = self.max_completion_tokens or self.max_tokens
        options["max_new_tokens"] = -1 if length is None else length
        if self.top_logprobs is not None and not self.logprobs:
            raise RefusalError(BAD_REQUEST, "'top_logprobs' needs 'logprobs': true.", field="top_logprobs")
        if self.logprobs:
            options["logprobs"] = self.top_logprobs or 0
        values = dict(self.chat_template_kwargs)
        if self.reasoning_effort is not None:
            values["reasoning_effort"] = self.reasoning_effort
        return Job(prompts=[self.messages], options=options, template_values=values, num_samples=self.n)


class ChatCompletion:
    """One request's answer, streamed or whole."""

    def __init__(self, desk: Desk, alias: str, body: ChatBody, requests: list[TextRequest]) -> None:
        self._desk, self._body, self._requests = desk, body, requests
        self._head = {"id": new_id("chatcmpl"), "created": now_s(), "model": alias}

    async def chunks(self) -> Parts:
        """Yield the chunks of a stream, and what ends it."""
        head = {**self._head, "object": "chat.completion.chunk"}
        for index in range(len(self._requests)):
            yield {**head, "choices": [_choice(index, delta={"role": "assistant", "content": ""})]}
        results: list[GenerationResult] = []
        async with aclosing(self._desk.events(self._requests)) as events:
            async for event in events:
                match event:
                    case Progress():
                        yield event
                    case Piece(index=index, chunk=chunk):
                        entries = self._entries(chunk.logprobs)
                        if chunk.text or entries:
                            choice = _choice(index, delta={"content": chunk.text}, logprobs=entries)
                            yield {**head, "choices": [choice]}
                    case Ended(index=index, result=result):
                        results.append(result)
                        choice = _choice(index, delta={}, finish=finish_reason(result))
                        yield {**head, "choices": [choice], "timings": timings([result])}
                    case Failed(error=error):
                        yield error_body(refusal_of(error))
        if self._body.stream_options.include_usage:
            yield {**head, "choices": [], "usage": usage(results)}
        yield "[DONE]"

    async def whole(self) -> Mapping[str, Any]:
        """Return the answer when all its texts have ended; raises what ended one of them early."""
        results = await results_of(self._desk.events(self._requests))
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": result.text},
                "logprobs": self._entries(result.logprobs),
                "finish_reason": finish_reason(result),
            }
            for index, result in enumerate(results)
        ]
        head = {**self._head, "object": "chat.completion"}
        return {**head, "choices": choices, "usage": usage(results), "timings": timings(results)}

    def _entries(self, logprobs: Any) -> dict[str, Any] | None:
        return {"content": logprob_fields(self._desk.engine.pair.tokenizer, logprobs)} if logprobs else None


async def chat_completion(desk: Desk, alias: str, given: Mapping[str, Any]) -> tuple[ChatCompletion, bool]:
    """Return an answer that has not begun, and whether it is streamed; raises RefusalError and EdgespecError."""
    body = fields_of(ChatBody, given, describing=DESCRIBING)
    return ChatCompletion(desk, alias, body, await desk.requests(body.job())), body.stream


def _choice(index: int, *, delta: Mapping[str, Any], finish: str | None = None, logprobs: Any = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
