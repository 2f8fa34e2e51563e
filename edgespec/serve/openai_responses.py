"""OpenAI's responses, without a memory of them: a body becomes a job, and its events the events that clients read.

This is what Codex asks for. Each request brings the whole conversation, whose rows the engine has kept.
"""

from collections.abc import Mapping
from contextlib import aclosing
from typing import Any, Literal

from pydantic import Field

from edgespec.serve.answer import Parts
from edgespec.serve.body import Fields, Items
from edgespec.serve.chat import AnswerDelta, AnswerEnded, ChatJob, ChatTexts, tools_of
from edgespec.serve.field_table import RESPONSES
from edgespec.serve.openai_schema import Budget, Length, SamplingFields, image_tokens, new_id, now_s, timings
from edgespec.serve.refusal import BAD_REQUEST, RefusalError, refusal_of
from edgespec.serve.request_fields import UnusedFields, only_functions, read_fields
from edgespec.serve.request_queue import PromptProgress, RequestQueue, TextFailed
from edgespec.serve.response_items import WrittenItems
from edgespec.serve.responses_prompt import LOGPROBS, added_tools, functions, messages_of
from edgespec.serve.served_model import LoraScale, ServedModel
from edgespec.text.results import GenerationResult


class TextFormat(Fields):
    """The format that the text is to have."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = "answer"
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    def response_format(self) -> dict[str, Any] | None:
        """Return it as chat completions say it."""
        if self.type == "json_schema":
            return {"type": self.type, "json_schema": {"name": self.name, "schema": self.schema_ or {}}}
        return None if self.type == "text" else {"type": self.type}


class TextFields(Fields):
    """What is said of the text."""

    format: TextFormat = TextFormat()
    verbosity: str | None = None  # a wish; no model here reads it


class Reasoning(Fields):
    """How much the model is to think; templates that do not know of it ignore it."""

    effort: str | None = None
    summary: str | None = None  # thoughts are sent whole
    generate_summary: str | None = None
    context: str | None = None
    max_tokens: Budget | None = None  # of thought, as in chat completions


class ChosenFunction(Fields):
    """The function that is to be called."""

    type: Literal["function"]
    name: str


class ResponsesBody(Fields):
    """The fields of a response that are done, with a few of chat completions'."""

    EMPTY_COUNTS = frozenset({"lora"})
    model: str = ""  # read before the others: `served_model.asked_model`
    input: str | Items[dict[str, Any]]
    instructions: str | None = None
    tools: Items[dict[str, Any]] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction = "auto"
    parallel_tool_calls: bool = True
    max_output_tokens: Length | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    text: TextFields = TextFields()
    reasoning: Reasoning = Reasoning()
    include: Items[str] = Field(default_factory=list)
    stream: bool = False
    stream_options: dict[Literal["include_obfuscation"], bool] = Field(default_factory=dict)
    truncation: Literal["disabled", "auto"] = "disabled"  # a server may drop turns, and this one never does
    lora: Items[LoraScale] | None = None

    def job(self, unused: UnusedFields) -> ChatJob:
        """Return what is to be written; raises RefusalError for content that is not read."""
        if LOGPROBS in self.include:
            what = f"'include' asks for {LOGPROBS}, which responses do not have here. Leave it out."
            raise RefusalError(BAD_REQUEST, what, code="unsupported_parameter", field="include")
        if self.truncation == "auto":
            unused.add("truncation", "a conversation is read whole, or refused")
        sampling = SamplingFields(
            temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, min_p=self.min_p, seed=self.seed,
            response_format=self.text.format.response_format(),
        )  # fmt: skip
        options = sampling.text_options()
        options["max_new_tokens"] = -1 if self.max_output_tokens is None else self.max_output_tokens
        if isinstance(self.tool_choice, ChosenFunction):
            choice, name = "named", self.tool_choice.name
        else:
            choice, name = self.tool_choice, None
        tools = functions(only_functions([*self.tools, *added_tools(self.input)], ("function",), unused))
        return ChatJob(
            prompts=[messages_of(self.instructions, self.input)],
            options=options,
            template_values={} if self.reasoning.effort is None else {"reasoning_effort": self.reasoning.effort},
            field_names={"reasoning_effort": "reasoning.effort", "reasoning_budget": "reasoning.max_tokens"},
            reasoning_budget=self.reasoning.max_tokens,
            continues=self._continues(),
            toolset=tools_of(tools, choice, name, has_parallel_calls=self.parallel_tool_calls),
        )

    def _continues(self) -> bool:
        """Return whether the last item is a message of the assistant's that is not complete, as vLLM has it."""
        last = self.input[-1] if isinstance(self.input, list) and self.input else {}
        return last.get("role") == "assistant" and last.get("status") in ("in_progress", "incomplete")


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
            "input_tokens_details": {"cached_tokens": result.cached_tokens, **image_tokens(result.image_tokens)},
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
    queue: RequestQueue, model: ServedModel, fields: Mapping[str, Any], unused: UnusedFields
) -> tuple[ResponseAnswer, bool]:
    """Return an answer that has not begun, and whether it is streamed; raises RefusalError and EdgespecError."""
    body = read_fields(ResponsesBody, RESPONSES, fields, unused)
    job = model.of(body.job(unused), body.lora)
    return ResponseAnswer(model.name, body, await ChatTexts.open(queue, job, unused), job), body.stream
