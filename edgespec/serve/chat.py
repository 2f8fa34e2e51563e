"""Answers to messages, told apart into what is said, what was thought, and calls of tools: for every chat protocol."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from edgespec.sampling.logprobs import TokenLogprob
from edgespec.serve.desk import Desk, Ended, Failed, Job, Piece, Progress
from edgespec.serve.refusal import BAD_REQUEST, RefusalError
from edgespec.text.answer import AnswerPart, AnswerReader, Tool, answer_form
from edgespec.text.call_grammar import forced_calls
from edgespec.text.handle import TextHandle
from edgespec.text.request import TextRequest
from edgespec.text.results import GenerationResult
from edgespec.tuning.step import StepResult

PROMPT_END = 64  # tokens of a prompt that may begin a part of the answer


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatJob(Job):
    """Messages that are answered, perhaps by calls of tools."""

    tools: Sequence[Tool] = ()
    forced: Sequence[Tool] = ()  # of which one has to be called
    has_one_call: bool = False  # an answer ends with its first call


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """More of an answer: a part of it, or the log-probabilities of tokens that brought none."""

    index: int
    part: AnswerPart
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """A pass over an answer, whose parts were said before."""

    index: int
    step: StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """An answer that is whole, or was interrupted."""

    index: int
    result: GenerationResult
    reason: Literal["stop", "length", "calls"]


ChatEvent: TypeAlias = Progress | Said | Passed | Finished | Failed


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeAnswer:
    """A whole answer."""

    result: GenerationResult
    reason: Literal["stop", "length", "calls"]
    parts: tuple[AnswerPart, ...] = field(default=())

    def text(self, kind: str) -> str:
        """Return what was said, or thought."""
        return "".join(part.text for part in self.parts if part.kind == kind)


class ChatTexts:
    """The answers of one request."""

    def __init__(self, desk: Desk, job: ChatJob, requests: Sequence[TextRequest], readers: list[AnswerReader]) -> None:
        self._desk, self._job, self.requests, self._readers = desk, job, requests, readers

    @classmethod
    async def open(cls, desk: Desk, job: ChatJob) -> ChatTexts:
        """Check a request before anything runs; raises RefusalError and EdgespecError."""
        tokenizer = desk.engine.pair.tokenizer
        form = answer_form(tokenizer)
        options = job.options if form is None else {**job.options, "skip_special_tokens": False}
        if job.tools:
            if not tokenizer.chat_template:
                what = "'tools' need a chat template, and the model has none. Leave them out."
                raise RefusalError(BAD_REQUEST, what, field="tools")
            job = replace(job, template_values={**job.template_values, "tools": list(job.tools)})
        requests = await desk.requests(replace(job, options=options))
        end = str(tokenizer.decode(requests[0].ids[-PROMPT_END:]))
        readers = [AnswerReader(form, prompt_end=end, tools=job.tools) for _ in requests]
        if job.forced:
            if {"grammar", "json_schema", "response_format"} & {*options}:
                what = "a call is required, and a form of the text as well. Leave out one of them."
                raise RefusalError(BAD_REQUEST, what, field="tool_choice")
            grammar = forced_calls(form, job.forced, is_thinking=readers[0].is_thinking)
            requests = await desk.with_grammar(requests, grammar)
        return cls(desk, job, requests, readers)

    async def events(self) -> AsyncGenerator[ChatEvent, None]:
        """Yield the answers as they are written; closing the generator ends them."""
        started: list[TextHandle] = []
        num_calls = [0] * len(self.requests)
        async with aclosing(self._desk.events(self.requests, started=started)) as events:
            async for event in events:
                match event:
                    case Piece(index=index, chunk=chunk):
                        logprobs = chunk.logprobs
                        for part in self._taken(index, self._readers[index].feed(chunk.text), num_calls, started):
                            yield Said(index=index, part=part, logprobs=logprobs)
                            logprobs = ()
                        if logprobs:
                            yield Said(index=index, part=AnswerPart(kind="content"), logprobs=logprobs)
                        yield Passed(index=index, step=chunk.step)
                    case Ended(index=index, result=result):
                        for part in self._taken(index, self._readers[index].end(), num_calls, started):
                            yield Said(index=index, part=part)
                        reason: Literal["stop", "length"] = "stop" if result.finish_reason == "stop" else "length"
                        yield Finished(index=index, result=result, reason="calls" if num_calls[index] else reason)
                    case other:
                        yield other

    def _taken(
        self, index: int, parts: Sequence[AnswerPart], num_calls: list[int], started: Sequence[TextHandle]
    ) -> Sequence[AnswerPart]:
        """Return the parts that count; an answer that may have one call ends with it."""
        taken = []
        for part in parts:
            if self._job.has_one_call and num_calls[index]:
                break
            taken.append(part)
            num_calls[index] += part.call is not None
        if self._job.has_one_call and num_calls[index]:
            started[index].cancel()
        return taken

    async def answers(self) -> list[WholeAnswer]:
        """Return all answers when they are whole; raises the first error, which ends the others."""
        parts: list[list[AnswerPart]] = [[] for _ in self.requests]
        found: dict[int, WholeAnswer] = {}
        async with aclosing(self.events()) as events:
            async for event in events:
                match event:
                    case Failed(error=error):
                        raise error
                    case Said(index=index, part=part):
                        parts[index].append(part)
                    case Finished(index=index, result=result, reason=reason):
                        found[index] = WholeAnswer(result=result, reason=reason, parts=tuple(parts[index]))
        return [found[index] for index in sorted(found)]


def chosen_tools(tools: Sequence[Tool], choice: str, named: str | None) -> tuple[Sequence[Tool], Sequence[Tool]]:
    """Return the tools that the model sees, and those of which it has to call one; raises RefusalError.

    `choice` is none, auto, required or named.
    """
    names = [tool["function"]["name"] for tool in tools]
    if choice == "named" and named not in names:
        raise RefusalError(
            BAD_REQUEST, f"'tool_choice' names {named!r}, and there is no such tool.", field="tool_choice"
        )
    if choice == "required" and not tools:
        raise RefusalError(BAD_REQUEST, "'tool_choice' requires a call, and there are no tools.", field="tool_choice")
    if choice == "none":
        return (), ()
    if choice == "named":
        return tools, [tool for tool in tools if tool["function"]["name"] == named]
    return tools, tools if choice == "required" else ()


def call_id(kind: str) -> str:
    """Return the id of a call, which its result names."""
    return f"{kind}_{secrets.token_hex(12)}"
