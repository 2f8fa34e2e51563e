"""OpenAI's chat completions: a body becomes a job, and its events the chunks that clients read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any, Literal

from pydantic import Field

from edgespec.sampling.logprobs import TokenLogprob
from edgespec.serve.answer import Parts
from edgespec.serve.body import Fields, Items, fields_of
from edgespec.serve.chat import ChatJob, ChatTexts, Finished, Passed, Said, check_template, tools_of
from edgespec.serve.desk import Desk, Failed, Progress
from edgespec.serve.openai_form import (
    DESCRIBING,
    NO_BOUND,
    Length,
    LogprobCount,
    SamplingFields,
    StreamOptions,
    error_body,
    new_id,
    now_s,
    timings,
    usage,
)
from edgespec.serve.refusal import BAD_REQUEST, RefusalError, refusal_of
from edgespec.text.answer import AnswerPart
from edgespec.text.logprob_entries import logprob_fields
from edgespec.text.request import TextOptions
from edgespec.text.results import GenerationResult
from edgespec.text.token_text import TokenText
from edgespec.text.tools import call_fields, message_of
from edgespec.tuning.step import StepResult

FINISH_REASONS = {"stop": "stop", "length": "length", "calls": "tool_calls"}


class Function(Fields):
    """A function that the model may call."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool | None = None  # calls fit the schema, as required ones do in any case


class FunctionTool(Fields):
    """A tool, which is a function."""

    type: Literal["function"]
    function: Function


class NamedFunction(Fields):
    """The name of the function that is to be called."""

    name: str


class NamedTool(Fields):
    """The tool that is to be called."""

    type: Literal["function"]
    function: NamedFunction


class ChatStreamOptions(StreamOptions):
    """What a chat's stream says beside the text, with one option of our own."""

    include_draft: bool = False  # after each pass, which of its tokens the draft foresaw, and its tree's sizes


class ChatBody(SamplingFields):
    """The fields of a chat completion that are honoured."""

    stream_options: ChatStreamOptions = ChatStreamOptions()
    messages: Items[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: Length | None = None
    logprobs: bool = False
    top_logprobs: int | None = LogprobCount
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    reasoning_effort: str | None = None  # for templates that read it
    verbosity: str | None = None  # a wish; no model here reads it
    modalities: Items[Literal["text"]] | None = None
    tools: Items[FunctionTool] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True

    def job(self) -> ChatJob:
        """Return what is to be written; raises RefusalError for fields that contradict each other."""
        options: TextOptions = self.text_options()
        length = self.max_completion_tokens or self.max_tokens
        options["max_new_tokens"] = NO_BOUND if length is None else length
        if self.top_logprobs and not self.logprobs:
            raise RefusalError(BAD_REQUEST, "'top_logprobs' needs 'logprobs': true.", field="top_logprobs")
        if self.logprobs:
            options["logprobs"] = self.top_logprobs or 0
        values = dict(self.chat_template_kwargs)
        if self.reasoning_effort is not None:
            values["reasoning_effort"] = self.reasoning_effort
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools]
        if isinstance(self.tool_choice, NamedTool):
            choice, name = "named", self.tool_choice.function.name
        else:
            choice, name = self.tool_choice, None
        return ChatJob(
            prompts=[self.messages],
            options=options,
            template_values=values,
            num_samples=self.n,
            toolset=tools_of(tools, choice, name, has_parallel_calls=self.parallel_tool_calls),
        )


class ChatCompletion:
    """One request's answer, streamed or whole."""

    def __init__(self, desk: Desk, alias: str, body: ChatBody, chat: ChatTexts) -> None:
        self._tokenizer, self._body, self._chat = desk.engine.pair.tokenizer, body, chat
        self._texts = [TokenText(self._tokenizer, without=request.stop_tokens) for request in chat.requests]
        self._head = {"id": new_id("chatcmpl"), "created": now_s(), "model": alias}

    async def chunks(self) -> Parts:
        """Yield the chunks of a stream, and what ends it."""
        head = {**self._head, "object": "chat.completion.chunk"}
        num_texts = len(self._chat.requests)
        for index in range(num_texts):
            yield {**head, "choices": [_choice(index, delta={"role": "assistant", "content": ""})]}
        results: list[GenerationResult] = []
        num_calls = [0] * num_texts
        async with aclosing(self._chat.events()) as events:
            async for event in events:
                match event:
                    case Progress():
                        yield event
                    case Said(index=index, part=part, logprobs=logprobs):
                        delta = _delta(part, num_calls[index])
                        num_calls[index] += part.call is not None
                        yield {**head, "choices": [_choice(index, delta=delta, logprobs=self._entries(logprobs))]}
                    case Passed(index=index, step=step) if self._body.stream_options.include_draft:
                        yield {**head, "choices": [], "draft": self._draft(index, step)}
                    case Finished(index=index, result=result, reason=reason):
                        results.append(result)
                        choice = _choice(index, delta={}, finish=FINISH_REASONS[reason])
                        yield {**head, "choices": [choice], "timings": timings([result])}
                    case Failed(error=error):
                        yield error_body(refusal_of(error))
        if self._body.stream_options.include_usage:
            yield {**head, "choices": [], "usage": usage(results)}
        yield "[DONE]"

    async def whole(self) -> Mapping[str, Any]:
        """Return the answer when all its texts have ended; raises what ended one of them early."""
        answers = await self._chat.answers()
        results = [answer.result for answer in answers]
        choices = [
            {
                "index": index,
                "message": message_of(answer.parts),
                "logprobs": self._entries(answer.result.logprobs),
                "finish_reason": FINISH_REASONS[answer.reason],
            }
            for index, answer in enumerate(answers)
        ]
        head = {**self._head, "object": "chat.completion"}
        return {**head, "choices": choices, "usage": usage(results), "timings": timings(results)}

    def _draft(self, index: int, step: StepResult) -> dict[str, Any]:
        """Return a pass in our own form: the text of each of its tokens, and whether the draft foresaw it."""
        foreseen = step.from_draft or (False,) * len(step.tokens)
        pieces = [self._texts[index].step(token) for token in step.tokens]
        return {
            "index": index,
            "tokens": [[piece, found] for piece, found in zip(pieces, foreseen, strict=True)],
            "nodes_by_depth": list(step.num_by_depth),
            "num_accepted": len(step.path),
        }

    def _entries(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        return {"content": logprob_fields(self._tokenizer, logprobs)} if logprobs else None


async def chat_completion(desk: Desk, alias: str, given: Mapping[str, Any]) -> tuple[ChatCompletion, bool]:
    """Return an answer that has not begun, and whether it is streamed; raises RefusalError and EdgespecError."""
    body = fields_of(ChatBody, given, describing=DESCRIBING)
    if body.chat_template_kwargs:
        names = {name: f"chat_template_kwargs.{name}" for name in body.chat_template_kwargs}
        check_template(desk, "chat_template_kwargs", names)
    return ChatCompletion(desk, alias, body, await ChatTexts.open(desk, body.job())), body.stream


def _delta(part: AnswerPart, number: int) -> dict[str, Any]:
    if part.call is not None:
        return {"tool_calls": [{"index": number, **call_fields(part.call)}]}
    return {"reasoning_content" if part.kind == "reasoning" else "content": part.text}


def _choice(index: int, *, delta: Mapping[str, Any], finish: str | None = None, logprobs: Any = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
