"""The body of a request for a response: the fields that are honoured, and the job that they are."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from edgespec.serve.body import Fields, Items
from edgespec.serve.chat import ChatJob, tools_of
from edgespec.serve.openai_schema import Length, SamplingFields
from edgespec.serve.refusal import BAD_REQUEST, RefusalError
from edgespec.serve.request_fields import UnusedFields, only_functions
from edgespec.serve.responses_prompt import LOGPROBS, added_tools, functions, messages_of


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


class ChosenFunction(Fields):
    """The function that is to be called."""

    type: Literal["function"]
    name: str


class ResponsesBody(Fields):
    """The fields of a response that are done, with a few of chat completions'."""

    model: str = ""  # one model is served, whatever clients call it
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
            field_names={"reasoning_effort": "reasoning.effort"},
            continues=self._continues(),
            toolset=tools_of(tools, choice, name, has_parallel_calls=self.parallel_tool_calls),
        )

    def _continues(self) -> bool:
        """Return whether the last item is a message of the assistant's that is not complete, as vLLM has it."""
        last = self.input[-1] if isinstance(self.input, list) and self.input else {}
        return last.get("role") == "assistant" and last.get("status") in ("in_progress", "incomplete")
