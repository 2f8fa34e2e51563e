"""OpenAI's chat completions: a body becomes a job, and its events the chunks that clients read."""

from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any, Literal

from pydantic import Field

from edgespec.chat.answer import AnswerPart
from edgespec.chat.given_template import unread
from edgespec.chat.tools import call_fields, message_of
from edgespec.sampling.logprobs import TokenLogprob
from edgespec.serve.answer import Parts
from edgespec.serve.body import Fields, Items, fields_of
from edgespec.serve.chat import AnswerDelta, AnswerEnded, ChatJob, ChatTexts, tools_of
from edgespec.serve.field_table import CHAT
from edgespec.serve.openai_schema import (
    NO_BOUND,
    Budget,
    Length,
    LogprobCount,
    SamplingFields,
    StreamOptions,
    error_body,
    new_id,
    now_s,
    timings,
    usage,
    usage_so_far,
)
from edgespec.serve.refusal import BAD_REQUEST, RefusalError, refusal_of
from edgespec.serve.request_fields import UnusedFields, only_functions, read_fields
from edgespec.serve.request_queue import PromptProgress, RequestQueue, TextDelta, TextFailed
from edgespec.serve.served_model import ServedModel
from edgespec.text.logprob_entries import logprob_fields
from edgespec.text.request import TextOptions
from edgespec.text.results import GenerationResult
from edgespec.text.token_text import TokenText
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

    type: Literal["function"] = "function"
    function: Function
    cache_control: dict[str, Any] | None = None  # rows are kept in any case


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


class ThinkingWish(Fields):
    """Whether the model is to think first, and how much, as several services have it; for templates that read it."""

    type: str | None = None
    enabled: bool | None = None
    effort: str | None = None
    max_tokens: Budget | None = None
    budget_tokens: Budget | None = None
    exclude: bool | None = None  # thoughts are sent apart
    summary: str | None = None


class ChatBody(SamplingFields):
    """The fields of a chat completion that are done."""

    stream_options: ChatStreamOptions = ChatStreamOptions()
    messages: Items[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: Length | None = None
    logprobs: bool = False
    top_logprobs: int | None = LogprobCount
    continue_final_message: bool | None = None  # None: where the last message is the assistant's
    add_generation_prompt: bool | None = None  # the contrary of it, which vLLM wants said beside it
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    reasoning_effort: str | None = None  # for templates that read it
    enable_thinking: bool | None = None
    thinking: bool | ThinkingWish | None = None
    reasoning: bool | ThinkingWish | None = None
    reasoning_budget: Budget | None = None
    modalities: Items[Literal["text"]] | None = None
    tools: Items[dict[str, Any]] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True

    def job(self, unused: UnusedFields) -> ChatJob:
        """Return what is to be written; raises RefusalError for fields that contradict each other."""
        options: TextOptions = self.text_options()
        length = self.max_completion_tokens or self.max_tokens
        options["max_new_tokens"] = NO_BOUND if length is None else length
        if self.top_logprobs and not self.logprobs:
            raise RefusalError(BAD_REQUEST, "'top_logprobs' needs 'logprobs': true.", field="top_logprobs")
        if self.logprobs:
            options["logprobs"] = self.top_logprobs or 0
        values, field_names = self._template_values()
        tools = [
            fields_of(FunctionTool, tool, location=f"{at}.").model_dump(exclude_none=True, exclude={"cache_control"})
            for at, tool in only_functions(self.tools, ("function", None), unused)
        ]
        if isinstance(self.tool_choice, NamedTool):
            choice, name = "named", self.tool_choice.function.name
        else:
            choice, name = self.tool_choice, None
        budget, field_names["reasoning_budget"] = self._reasoning_budget()
        return ChatJob(
            prompts=[self.messages],
            options=options,
            reasoning_budget=budget,
            template_values=values,
            field_names=field_names,
            num_samples=self.n,
            stop_token_ids=self.stop_token_ids or (),
            continues=self._continues(),
            toolset=tools_of(tools, choice, name, has_parallel_calls=self.parallel_tool_calls),
        )

    def _template_values(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Return what the chat template is to read, and the fields that it comes from."""
        found: dict[str, tuple[Any, str]] = {}
        for name in ("thinking", "reasoning"):
            wish = getattr(self, name)
            wish = ThinkingWish(enabled=wish) if isinstance(wish, bool) else wish
            if wish is not None and (wish.enabled is not None or wish.type is not None):
                is_on = wish.type != "disabled" if wish.enabled is None else wish.enabled
                found["enable_thinking"] = is_on, name
            if wish is not None and wish.effort is not None:
                found["reasoning_effort"] = wish.effort, f"{name}.effort"
        for name in ("enable_thinking", "reasoning_effort"):
            if getattr(self, name) is not None:
                found[name] = getattr(self, name), name
        found |= {name: (value, f"chat_template_kwargs.{name}") for name, value in self.chat_template_kwargs.items()}
        return {name: value for name, (value, _) in found.items()}, {name: at for name, (_, at) in found.items()}

    def _reasoning_budget(self) -> tuple[int | None, str]:
        """Return the tokens that the answer may think, and the field that says so."""
        found = {"reasoning_budget": self.reasoning_budget}
        for name in ("thinking", "reasoning"):
            if isinstance(wish := getattr(self, name), ThinkingWish):
                found |= {f"{name}.max_tokens": wish.max_tokens, f"{name}.budget_tokens": wish.budget_tokens}
        return next(((value, name) for name, value in found.items() if value is not None), (None, "reasoning_budget"))

    def _continues(self) -> bool | None:
        """Return whether the last message goes on, where the body says so; raises RefusalError for contradictions."""
        wish, begins = self.continue_final_message, self.add_generation_prompt
        if begins is None:
            return wish
        if wish is begins:
            what = (
                f"'add_generation_prompt' and 'continue_final_message' are both {str(begins).lower()}. Leave one out."
            )
            raise RefusalError(BAD_REQUEST, what, field="add_generation_prompt")
        return not begins


class ChatCompletion:
    """One request's answer, streamed or whole."""

    def __init__(self, queue: RequestQueue, alias: str, body: ChatBody, chat: ChatTexts) -> None:
        self._tokenizer, self._body, self._chat = queue.engine.pair.tokenizer, body, chat
        self._texts = [TokenText(self._tokenizer, without=request.stop_tokens) for request in chat.requests]
        self._head = {"id": new_id("chatcmpl"), "created": now_s(), "model": alias}

    async def chunks(self) -> Parts:
        """Yield the chunks of a stream, and what ends it."""
        head = {**self._head, "object": "chat.completion.chunk"}
        num_texts = len(self._chat.requests)
        for index in range(num_texts):
            choice = _choice(index, delta={"role": "assistant", "content": ""})
            yield {**head, "choices": [choice], **self._so_far(index, 0)}
        results: list[GenerationResult] = []
        num_thoughts = 0
        num_calls = [0] * num_texts
        async with aclosing(self._chat.events()) as events:
            async for event in events:
                match event:
                    case PromptProgress():
                        yield event
                    case AnswerDelta(index=index, part=part, num_written=num_written, logprobs=logprobs):
                        choice = _choice(index, delta=_delta(part, num_calls[index]), logprobs=self._entries(logprobs))
                        num_calls[index] += part.call is not None
                        yield {**head, "choices": [choice], **self._so_far(index, num_written)}
                    case TextDelta(index=index, chunk=chunk) if self._body.stream_options.include_draft:
                        yield {**head, "choices": [], "draft": self._draft(index, chunk.step)}
                    case AnswerEnded(index=index, result=result, reason=reason, num_thought=num_thought):
                        results.append(result)
                        num_thoughts += num_thought
                        choice = _choice(index, delta={}, finish=FINISH_REASONS[reason])
                        numbers = {"timings": timings([result]), **self._so_far(index, len(result.token_ids))}
                        yield {**head, "choices": [choice], **numbers}
                    case TextFailed(error=error):
                        yield error_body(refusal_of(error))
        if self._body.stream_options.include_usage:
            yield {**head, "choices": [], "usage": usage(results, num_thought=num_thoughts)}
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
        numbers = usage(results, num_thought=sum(answer.num_thought for answer in answers))
        return {**head, "choices": choices, "usage": numbers, "timings": timings(results)}

    def _so_far(self, index: int, num_written: int) -> dict[str, Any]:
        """Return the usage of a chunk, where each is to have one."""
        if not self._body.stream_options.continuous_usage_stats:
            return {}
        return {"usage": usage_so_far(len(self._chat.requests[index].ids), num_written)}

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


async def chat_completion(
    queue: RequestQueue, model: ServedModel, fields: Mapping[str, Any], unused: UnusedFields
) -> tuple[ChatCompletion, bool]:
    """Return an answer that has not begun, and whether it is streamed; raises RefusalError and EdgespecError."""
    body = read_fields(ChatBody, CHAT, fields, unused)
    if "documents" in body.chat_template_kwargs and unread(queue.engine.pair.tokenizer, ("documents",)):
        what = "'chat_template_kwargs.documents' would be lost: the model's chat template does not read documents."
        name = "chat_template_kwargs.documents"
        raise RefusalError(BAD_REQUEST, f"{what} Put them into the messages.", field=name)
    chat = await ChatTexts.open(queue, model.of(body.job(unused), body.lora), unused)
    return ChatCompletion(queue, model.name, body, chat), body.stream


def _delta(part: AnswerPart, number: int) -> dict[str, Any]:
    if part.call is not None:
        return {"tool_calls": [{"index": number, **call_fields(part.call)}]}
    return {"reasoning_content" if part.kind == "reasoning" else "content": part.text}


def _choice(index: int, *, delta: Mapping[str, Any], finish: str | None = None, logprobs: Any = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
