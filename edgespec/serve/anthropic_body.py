"""The body of a request for a message: the fields that are honoured, and the job that they are."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from edgespec.serve.anthropic_prompt import messages_of
from edgespec.serve.body import Fields, Items, fields_of
from edgespec.serve.chat import ChatJob, tools_of
from edgespec.serve.openai_schema import MAX_STOPS, Budget, Length
from edgespec.serve.request_fields import UnusedFields, only_functions
from edgespec.text.request import TextOptions


class Tool(Fields):
    """A tool that the client runs."""

    type: Literal["custom"] = "custom"
    name: str = Field(min_length=1)
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool = False
    cache_control: dict[str, Any] | None = None  # rows are kept in any case
    eager_input_streaming: bool = False  # a call is sent when it is whole
    defer_loading: Literal[False] = False

    def as_function(self) -> dict[str, Any]:
        """Return it in OpenAI's form."""
        described = {} if self.description is None else {"description": self.description}
        kept = {"name": self.name, **described, "parameters": self.input_schema, "strict": self.strict}
        return {"type": "function", "function": kept}


class ToolChoice(Fields):
    """Whether a tool has to be called."""

    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Fields):
    """Whether the model is to think first, and how long."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Budget | None = None
    display: str | None = None


class OutputFormat(Fields):
    """The form that the text is to have."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Fields):
    """What is said of the answer."""

    effort: str | None = None  # for templates that read it
    format: OutputFormat | None = None


class Edit(Fields):
    """A change of the conversation that changes nothing: all thoughts are kept, as far as the template keeps them."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextManagement(Fields):
    """Changes of a conversation that the client leaves to the server."""

    edits: Items[Edit] = Field(default_factory=list)


class CountedBody(Fields):
    """The fields of a prompt."""

    model: str = ""  # one model is served, whatever clients call it
    messages: Items[dict[str, Any]] = Field(min_length=1)
    system: str | Items[dict[str, Any]] | None = None
    tools: Items[dict[str, Any]] = Field(default_factory=list)
    tool_choice: ToolChoice = ToolChoice()
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    output_format: OutputFormat | None = None  # an older name of `output_config.format`
    context_management: ContextManagement | None = None

    def text_options(self) -> TextOptions:
        """Return the options of the text."""
        wanted = self.output_config.format or self.output_format
        return {"max_new_tokens": 1} if wanted is None else {"max_new_tokens": 1, "json_schema": wanted.schema_}

    def job(self, unused: UnusedFields) -> ChatJob:
        """Return what is to be written; raises RefusalError for content that is not read."""
        tools = [
            fields_of(Tool, tool, location=f"{location}.").as_function()
            for location, tool in only_functions(self.tools, ("custom", None), unused)
        ]
        choice = {"any": "required", "tool": "named"}.get(self.tool_choice.type, self.tool_choice.type)
        has_parallel_calls = not self.tool_choice.disable_parallel_tool_use
        values: dict[str, Any] = {}
        if self.output_config.effort is not None:
            values["reasoning_effort"] = self.output_config.effort
        if self.thinking is not None:
            values["enable_thinking"] = self.thinking.type != "disabled"
        names = {"reasoning_effort": "output_config.effort", "enable_thinking": "thinking"}
        return ChatJob(
            prompts=[messages_of(self.system, self.messages)],
            options=self.text_options(),
            template_values=values,
            field_names={**names, "reasoning_budget": "thinking.budget_tokens"},
            reasoning_budget=None if self.thinking is None else self.thinking.budget_tokens,
            toolset=tools_of(tools, choice, self.tool_choice.name, has_parallel_calls=has_parallel_calls),
        )


class MessagesBody(CountedBody):
    """The fields of a message that are done."""

    max_tokens: Length
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: Items[str] = Field(default_factory=list, max_length=MAX_STOPS)

    def text_options(self) -> TextOptions:
        """Return the options of the text."""
        options: TextOptions = {**super().text_options(), "max_new_tokens": self.max_tokens}
        if self.temperature is not None:
            options["temperature"] = self.temperature
        if self.top_p is not None:
            options["top_p"] = self.top_p
        if self.top_k is not None:
            options["top_k"] = 0 if self.top_k == -1 else self.top_k
        if stops := [stop for stop in self.stop_sequences if stop]:
            options["stop"] = stops
        return options
