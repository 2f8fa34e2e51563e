"""The body of a request for a response: the fields that are honoured, and the job that they are."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from edgespec.serve.body import Fields, Items
from edgespec.serve.chat import ChatJob, chosen_tools
from edgespec.serve.openai_form import SamplingFields
from edgespec.serve.refusal import BAD_REQUEST, RefusalError
from edgespec.serve.responses_prompt import added_tools, messages_of

LOG = logging.getLogger("edgespec.serve")


class TextForm(Fields):
    """The form that the text is to have."""

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

    format: TextForm = TextForm()
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
    """The fields of a response that are honoured, with a few of chat completions'."""

    model: str = ""  # one model is served, whatever clients call it
    input: str | Items[dict[str, Any]]
    instructions: str | None = None
    tools: Items[dict[str, Any]] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction = "auto"
    parallel_tool_calls: bool = True
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    text: TextFields = TextFields()
    reasoning: Reasoning = Reasoning()
    include: Items[Literal["reasoning.encrypted_content"]] = Field(default_factory=list)
    stream: bool = False
    stream_options: dict[Literal["include_obfuscation"], bool] = Field(default_factory=dict)
    truncation: Literal["disabled"] = "disabled"

    def job(self) -> ChatJob:
        """Return what is to be written; raises RefusalError for content that is not read."""
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
        seen, forced = chosen_tools(functions([*self.tools, *added_tools(self.input)]), choice, name)
        return ChatJob(
            prompts=[messages_of(self.instructions, self.input)],
            options=options,
            template_values={} if self.reasoning.effort is None else {"reasoning_effort": self.reasoning.effort},
            tools=seen,
            forced=forced,
            has_one_call=name is not None or not self.parallel_tool_calls,
        )


def functions(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the functions among tools as templates read them.

    Others are run by OpenAI, or have calls of a form of their own: they are left out, and the log names them.
    """
    found, others = [], []
    for number, tool in enumerate(tools):
        if tool.get("type") != "function":
            others.append(str(tool.get("type")))
            continue
        if not isinstance(tool.get("name"), str):
            raise RefusalError(BAD_REQUEST, f"'tools.{number}' has no name.", field=f"tools.{number}.name")
        kept = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
        found.append({"type": "function", "function": {"parameters": {"type": "object", "properties": {}}, **kept}})
    if others:
        LOG.warning("tools of type %s are left out: only functions are called", ", ".join(dict.fromkeys(others)))
    return found
