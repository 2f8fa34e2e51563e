"""Answers to messages, told apart into what is said, what was thought, and calls of tools: for every chat protocol."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from edgespec.errors import EdgespecError
from edgespec.pair.chat_templates import unread
from edgespec.sampling.logprobs import TokenLogprob
from edgespec.serve.desk import Desk, Ended, Failed, Job, Piece, Progress
from edgespec.serve.refusal import BAD_REQUEST, RefusalError
from edgespec.text.answer import AnswerPart, AnswerReader, Tool, answer_form
from edgespec.text.handle import TextHandle
from edgespec.text.request import TextRequest
from edgespec.text.results import GenerationResult
from edgespec.text.tools import Toolset, chosen_tools
from edgespec.tuning.step import StepResult

Reason: TypeAlias = Literal["stop", "length", "calls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatJob(Job):
    """Messages that are answered, perhaps by calls of tools."""

    toolset: Toolset = field(default_factory=Toolset)


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
    reason: Reason


ChatEvent: TypeAlias = Progress | Said | Passed | Finished | Failed


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeAnswer:
    """A whole answer."""

    result: GenerationResult
    reason: Reason
    parts: tuple[AnswerPart, ...] = ()


class ChatTexts:
    """The answers of one request."""

    def __init__(self, desk: Desk, requests: Sequence[TextRequest], readers: Sequence[AnswerReader]) -> None:
        self._desk, self.requests, self._readers = desk, requests, readers

    @classmethod
    async def open(cls, desk: Desk, job: ChatJob) -> ChatTexts:
        """Check a request before anything runs; raises RefusalError and EdgespecError."""
        tokenizer = desk.engine.pair.tokenizer
        form = answer_form(tokenizer)
        options = job.options if form is None else {**job.options, "skip_special_tokens": False}
        toolset = job.toolset
        if wishes := unread(tokenizer, job.template_values):
            desk.say_once(f"asked for and not applied: the chat template does not read {', '.join(wishes)}")
        if toolset.seen:
            check_template(desk, "tools", {"tools": "tools"})
            job = replace(job, template_values={**job.template_values, "tools": toolset.for_template()})
        requests = await desk.requests(replace(job, options=options))
        readers = [toolset.reader(tokenizer, form, request.ids) for request in requests]
        grammar = toolset.grammar(tokenizer, form, requests[0].ids)
        if grammar is not None:
            if requests[0].grammar is not None:
                what = f"'{toolset.enforces}' asks for calls of a form, and another form of the text is given as well."
                raise RefusalError(BAD_REQUEST, f"{what} Leave out one of them.", field=toolset.enforces)
            requests = await desk.with_grammar(requests, grammar)
        return cls(desk, requests, readers)

    async def events(self) -> AsyncGenerator[ChatEvent, None]:
        """Yield the answers as they are written; closing the generator ends them."""
        started: list[TextHandle] = []
        async with aclosing(self._desk.events(self.requests, started=started)) as events:
            async for event in events:
                match event:
                    case Piece(index=index, chunk=chunk):
                        logprobs = chunk.logprobs
                        for part in self._readers[index].feed(chunk.text):
                            yield Said(index=index, part=part, logprobs=logprobs)
                            logprobs = ()
                        if self._readers[index].is_done:
                            started[index].cancel()
                        if logprobs:
                            yield Said(index=index, part=AnswerPart(kind="content"), logprobs=logprobs)
                        yield Passed(index=index, step=chunk.step)
                    case Ended(index=index, result=result):
                        for part in self._readers[index].end():
                            yield Said(index=index, part=part)
                        reason: Reason = "stop" if result.finish_reason == "stop" else "length"
                        reason = "calls" if self._readers[index].num_calls else reason
                        yield Finished(index=index, result=result, reason=reason)
                    case other:
                        yield other

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


def check_template(desk: Desk, field: str, names: Mapping[str, str]) -> None:
    """Raise RefusalError for a field with what a chat template is to read, by name, where the model's reads it not."""
    tokenizer = desk.engine.pair.tokenizer
    if not tokenizer.chat_template:
        what = f"'{field}' needs a chat template, and the model has none. Leave it out."
        raise RefusalError(BAD_REQUEST, what, field=field)
    for name in unread(tokenizer, names):
        what = f"'{names[name]}' would have no effect: the model's chat template does not read {name}. Leave it out."
        raise RefusalError(BAD_REQUEST, what, field=names[name])


def tools_of(tools: Sequence[Tool], choice: str, named: str | None, *, has_parallel_calls: bool) -> Toolset:
    """Return the tools of an answer; raises RefusalError where the choice cannot be made."""
    try:
        return chosen_tools(tools, choice, named, has_parallel_calls=has_parallel_calls)
    except EdgespecError as error:
        raise RefusalError(BAD_REQUEST, error.what, field="tool_choice") from error
