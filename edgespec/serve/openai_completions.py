"""OpenAI's plain completions: texts or token ids are continued, without a chat template."""

from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any

from edgespec.sampling.logprobs import TokenLogprob
from edgespec.serve.answer import Parts
from edgespec.serve.body import Items
from edgespec.serve.field_table import COMPLETIONS
from edgespec.serve.openai_schema import (
    LengthOrNone,
    LogprobCount,
    SamplingFields,
    error_body,
    finish_reason,
    new_id,
    now_s,
    timings,
    usage,
    usage_so_far,
)
from edgespec.serve.refusal import BAD_REQUEST, RefusalError, refusal_of
from edgespec.serve.request_fields import UnusedFields, read_fields
from edgespec.serve.request_queue import Job, PromptProgress, RequestQueue, TextDelta, TextEnded, TextFailed, ends_of
from edgespec.serve.served_model import ServedModel
from edgespec.text.logprob_entries import TokenPlaces, completion_logprobs, logprob_fields, prompt_fields
from edgespec.text.request import TextRequest
from edgespec.text.results import GenerationResult

DEFAULT_MAX_TOKENS = 16  # as OpenAI has it
Logprobs = Sequence[TokenLogprob]


class CompletionBody(SamplingFields):
    """The fields of a completion that are done."""

    prompt: str | Items[int] | Items[str] | Items[Items[int]]
    logprobs: int | None = LogprobCount
    echo: bool = False
    max_tokens: LengthOrNone | None = None
    skip_special_tokens: bool = True

    @property
    def prompts(self) -> list[Any]:
        """The prompts: a list of numbers is one of token ids."""
        is_list = isinstance(self.prompt, list)
        return (
            list(self.prompt) if is_list and not all(isinstance(part, int) for part in self.prompt) else [self.prompt]
        )

    def job(self) -> Job:
        """Return what is to be written; raises RefusalError where there is nothing to continue."""
        prompts = self.prompts
        if not prompts or not all(prompts):
            raise RefusalError(BAD_REQUEST, "'prompt' is empty. Give at least one character.", field="prompt")
        options = self.text_options()
        if self.max_tokens == 0 and not self.echo:
            raise RefusalError(BAD_REQUEST, "'max_tokens' is 0, which needs 'echo': true.", field="max_tokens")
        options["max_new_tokens"] = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        if self.echo and (self.logprobs is not None or self.max_tokens == 0):
            options["prompt_logprobs"] = self.logprobs or 0
        if self.logprobs is not None:
            options["logprobs"] = self.logprobs
        if not self.skip_special_tokens:
            options["skip_special_tokens"] = False
        ends = self.stop_token_ids or ()
        return Job(prompts=prompts, options=options, num_samples=self.n, stop_token_ids=ends)


class Completion:
    """One request's answer, streamed or whole."""

    def __init__(self, queue: RequestQueue, alias: str, body: CompletionBody, requests: list[TextRequest]) -> None:
        self._queue, self._body, self._requests = queue, body, requests
        self._num_prompts = len(body.prompts)
        self._head = {"id": new_id("cmpl"), "object": "text_completion", "created": now_s(), "model": alias}

    async def chunks(self) -> Parts:
        """Yield the chunks of a stream, and what ends it."""
        results: dict[int, GenerationResult] = {}
        written = [0] * len(self._requests)
        scores = self._body.echo and self._body.logprobs is not None
        has_prompt = [not scores] * len(self._requests)  # whether the prompt has been sent
        places = [TokenPlaces() for _ in self._requests]
        if self._body.echo and not scores:
            for index in range(len(self._requests)):
                choice = _choice(index, self._prompt_text(index))
                yield {**self._head, "choices": [choice], **self._so_far(index, 0)}
        async with aclosing(self._queue.events(self._requests)) as events:
            async for event in events:
                match event:
                    case PromptProgress():
                        yield event
                    case TextDelta(index=index, chunk=chunk):
                        if not has_prompt[index]:
                            text, has_prompt[index] = self._prompt_text(index), True
                            entries = self._entries(index, (), chunk.step.prompt_logprobs)
                            places[index] = TokenPlaces(len(text))
                            choice = _choice(index, text, logprobs=entries)
                            yield {**self._head, "choices": [choice], **self._so_far(index, 0)}
                        entries = self._entries(index, chunk.logprobs, places=places[index])
                        written[index] += len(chunk.token_ids)
                        if chunk.text or entries:
                            choice = _choice(index, chunk.text, logprobs=entries)
                            yield {**self._head, "choices": [choice], **self._so_far(index, written[index])}
                    case TextEnded(index=index, result=result):
                        results[index] = result
                        choice = _choice(index, "", finish=finish_reason(result))
                        numbers = {"timings": timings([result]), **self._so_far(index, len(result.token_ids))}
                        yield {**self._head, "choices": [choice], **numbers}
                    case TextFailed(error=error):
                        yield error_body(refusal_of(error))
        if self._body.stream_options.include_usage:
            ordered = [results[index] for index in sorted(results)]
            yield {**self._head, "choices": [], "usage": usage(ordered, self._num_prompts)}
        yield "[DONE]"

    async def whole(self) -> Mapping[str, Any]:
        """Return the answer when all its texts have ended; raises what ended one of them early."""
        ends = await ends_of(self._queue.events(self._requests), TextEnded)
        results = [ended.result for ended in ends]
        choices = [
            _choice(
                index,
                (self._prompt_text(index) if self._body.echo else "") + result.text,
                finish=finish_reason(result),
                logprobs=self._entries(index, result.logprobs, result.prompt_logprobs if self._body.echo else None),
            )
            for index, result in enumerate(results)
        ]
        numbers = {"usage": usage(results, self._num_prompts), "timings": timings(results)}
        return {**self._head, "choices": choices, **numbers}

    def _so_far(self, index: int, num_written: int) -> dict[str, Any]:
        """Return the usage of a chunk, where each is to have one."""
        if not self._body.stream_options.continuous_usage_stats:
            return {}
        return {"usage": usage_so_far(len(self._requests[index].ids), num_written)}

    def _prompt_text(self, index: int) -> str:
        prompt = self._body.prompts[index // self._body.n]
        return prompt if isinstance(prompt, str) else str(self._queue.engine.pair.tokenizer.decode(prompt))

    def _entries(
        self, index: int, logprobs: Logprobs, of_prompt: Logprobs | None = None, *, places: TokenPlaces | None = None
    ) -> dict[str, Any] | None:
        """Return the entries of new tokens, after those of the prompt's where it stands before them."""
        if self._body.logprobs is None or (of_prompt is None and not logprobs):
            return None
        tokenizer = self._queue.engine.pair.tokenizer
        entries = logprob_fields(tokenizer, logprobs)
        if of_prompt is None:
            return completion_logprobs(entries, places=places)
        prompt = prompt_fields(tokenizer, self._requests[index].ids[0], of_prompt)
        return completion_logprobs([*prompt, *entries], prompt=self._prompt_text(index), num_prompt=len(prompt))


async def completion(
    queue: RequestQueue, model: ServedModel, fields: Mapping[str, Any], unused: UnusedFields
) -> tuple[Completion, bool]:
    """Return an answer that has not begun, and whether it is streamed; raises RefusalError and EdgespecError."""
    body = read_fields(CompletionBody, COMPLETIONS, fields, unused)
    requests = await queue.requests(model.of(body.job(), body.lora))
    return Completion(queue, model.name, body, requests), body.stream


def _choice(index: int, text: str, *, finish: str | None = None, logprobs: Any = None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
