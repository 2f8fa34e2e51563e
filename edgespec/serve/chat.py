"""Answers to messages, told apart into what is said, what was thought, and calls of tools: for every chat protocol."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, TypeAlias

from edgespec.chat.answer import AnswerPart, Tool, answer_format_of
from edgespec.chat.given_template import unread
from edgespec.chat.thinking import NO_THOUGHTS
from edgespec.chat.tools import Toolset, chosen_tools
from edgespec.errors import EdgespecError
from edgespec.sampling.logprobs import TokenLogprob
from edgespec.serve.refusal import BAD_REQUEST, RefusalError
from edgespec.serve.request_fields import UnusedFields
from edgespec.serve.request_queue import Job, PromptProgress, RequestQueue, TextDelta, TextEnded, TextFailed, ends_of
from edgespec.text.handle import TextHandle
from edgespec.text.request import TextRequest

Reason: TypeAlias = Literal["stop", "length", "calls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatJob(Job):
    """Messages that are answered, perhaps by calls of tools."""

    toolset: Toolset = field(default_factory=Toolset)
    reasoning_budget: int | None = None  # None: the server's own
    field_names: Mapping[str, str] = field(default_factory=dict)  # of template values, where the body has others


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerDelta:
    """More of an answer: a part of it, or the log-probabilities of tokens that brought none."""

    index: int
    part: AnswerPart
    num_written: int  # tokens of the answer so far
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerEnded(TextEnded):
    """An answer that is whole, or was interrupted."""

    reason: Reason
    parts: tuple[AnswerPart, ...]


ChatEvent: TypeAlias = PromptProgress | AnswerDelta | TextDelta | AnswerEnded | TextFailed


class ChatTexts:
    """The answers of one request."""

    def __init__(self, queue: RequestQueue, requests: Sequence[TextRequest], toolset: Toolset) -> None:
        tokenizer = queue.engine.pair.tokenizer
        self._queue, self.requests = queue, requests
        self._readers = [toolset.reader(tokenizer, answer_format_of(tokenizer), one.ids) for one in requests]
        self._num_thought = partial(toolset.num_thought, queue.engine.pair, requests[0].ids)

    @classmethod
    async def open(cls, queue: RequestQueue, job: ChatJob, unused: UnusedFields) -> ChatTexts:
        """Check a request before anything runs; raises RefusalError and EdgespecError.

        What the chat template does not read is `unused`, tools that may be called among it.
        """
        tokenizer = queue.engine.pair.tokenizer
        answer_format = answer_format_of(tokenizer)
        options = job.options if answer_format is None else {**job.options, "skip_special_tokens": False}
        toolset = job.toolset
        for name in unread(tokenizer, job.template_values):
            unused.add(job.field_names.get(name, name), f"the model's chat template does not read {name}")
        if toolset.seen and unread(tokenizer, ("tools",)):
            if toolset.forced:
                what = "'tool_choice' asks for a call, and the model's chat template does not read tools."
                raise RefusalError(BAD_REQUEST, f"{what} Leave it out.", field="tool_choice")
            unused.add("tools", "the model's chat template does not read tools")
            toolset = Toolset()
        if toolset.seen:
            job = replace(job, template_values={**job.template_values, "tools": toolset.for_template()})
        requests = await queue.requests(replace(job, options=options))
        try:
            budget = toolset.budget(queue.engine.pair, requests[0].ids, job.reasoning_budget)
        except EdgespecError:
            unused.add(job.field_names.get("reasoning_budget", "reasoning_budget"), NO_THOUGHTS)
            budget = None
        if budget is not None and budget.leaves_nothing(most := requests[0].max_new_tokens):
            queue.say_once(
                f"a client's budget of {budget.most} tokens of thought may leave none of {most} for an answer"
            )
        requests = [replace(request, thought_budget=budget) for request in requests]
        answer = None if requests[0].grammar is None else requests[0].grammar.grammar
        toolset = replace(toolset, ends_with_words=answer is not None)
        grammar = toolset.grammar(tokenizer, answer_format, requests[0].ids, answer=answer)
        if grammar is not None and grammar is not answer:
            requests = await queue.with_grammar(requests, grammar)
        return cls(queue, requests, toolset)

    async def events(self) -> AsyncGenerator[ChatEvent, None]:
        """Yield the answers as they are written, each pass after its parts; closing the generator ends them."""
        started: list[TextHandle] = []
        written: list[int] = [0] * len(self.requests)
        parts: list[list[AnswerPart]] = [[] for _ in self.requests]
        events = self._queue.events(self.requests, started=started, num_thought=self._num_thought)
        async with aclosing(events):
            async for event in events:
                match event:
                    case TextDelta(index=index, chunk=chunk):
                        logprobs = chunk.logprobs
                        written[index] += len(chunk.token_ids)
                        for part in self._readers[index].feed(chunk.text):
                            parts[index].append(part)
                            yield AnswerDelta(index=index, part=part, num_written=written[index], logprobs=logprobs)
                            logprobs = ()
                        if self._readers[index].is_done:
                            started[index].cancel()
                        if logprobs:
                            parts[index].append(AnswerPart(kind="content"))
                            yield AnswerDelta(
                                index=index, part=parts[index][-1], num_written=written[index], logprobs=logprobs
                            )
                        yield event
                    case TextEnded(index=index, result=result, num_thought=num_thought):
                        for part in self._readers[index].end():
                            parts[index].append(part)
                            yield AnswerDelta(index=index, part=part, num_written=written[index])
                        reason: Reason = "stop" if result.finish_reason == "stop" else "length"
                        reader = self._readers[index]
                        has_ended = reason == "stop" or reader.is_done  # what a bound cut may lack a call
                        reason = "calls" if reader.num_calls and has_ended else reason
                        yield AnswerEnded(
                            index=index, result=result, reason=reason,
                            num_thought=num_thought, parts=tuple(parts[index]),
                        )  # fmt: skip
                    case other:
                        yield other

    async def answers(self) -> list[AnswerEnded]:
        """Return all answers when they are whole; raises the first error, which ends the others."""
        return await ends_of(self.events(), AnswerEnded)


def tools_of(tools: Sequence[Tool], choice: str, named: str | None, *, has_parallel_calls: bool) -> Toolset:
    """Return the tools of an answer; raises RefusalError where the choice cannot be made."""
    try:
        return chosen_tools(tools, choice, named, has_parallel_calls=has_parallel_calls)
    except EdgespecError as error:
        raise RefusalError(BAD_REQUEST, error.what, field="tool_choice") from error
