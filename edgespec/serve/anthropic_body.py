"""The body of a request for a message: the fields that are honoured, and the job that they are."""

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, Literal

from pydantic import Field

from edgespec.chat.picture_parts import is_picture, text_of
from edgespec.serve.body import Fields, Items, fields_of
from edgespec.serve.chat import ChatJob, tools_of
from edgespec.serve.openai_schema import MAX_STOPS, Budget, Length
from edgespec.serve.refusal import BAD_REQUEST, RefusalError
from edgespec.serve.request_fields import UnusedFields, only_functions
from edgespec.serve.served_model import LoraScale
from edgespec.text.request import TextOptions
from edgespec.validation import shown

Blocks = str | Sequence[Mapping[str, Any]]
ROLES = ("user", "assistant", "system")
MESSAGE_FIELDS = {"role", "content"}
# What a block may say; citations, signatures and callers describe it, and its rows are kept in any case
BLOCK_FIELDS = {
    "text": {"text", "citations", "cache_control"},
    "image": {"source", "cache_control"},
    "thinking": {"thinking", "signature"},
    "redacted_thinking": {"data"},
    "tool_use": {"id", "name", "input", "caller", "cache_control"},
    "tool_result": {"tool_use_id", "content", "is_error", "cache_control"},
}


def messages_of(system: Blocks | None, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages; raises RefusalError for a role or a block that is not read."""
    found = [{"role": "system", "content": _joined(system, "system")}] if system else []
    for number, message in enumerate(messages):
        location, role = f"messages.{number}", message.get("role")
        _check_known(message, MESSAGE_FIELDS, location)
        if role not in ROLES:
            raise _refused(f"{location}.role", f"is {shown(role)}, and none of {', '.join(ROLES)}")
        found += _messages(str(role), message.get("content"), f"{location}.content")
    return found


def _messages(role: str, content: Any, location: str) -> Iterator[dict[str, Any]]:
    """Yield the messages that one message's blocks are: results of tools stand alone, before the user's own words."""
    parts, thoughts, calls = [], [], []
    for where, block in _blocks(content, location):
        match block.get("type"):
            case "text":
                parts.append(_words(block, where))
            case "image" if role == "user":
                parts.append(_picture(block))
            case "thinking" if role == "assistant":
                thoughts.append(_text(block, "thinking", where))
            case "redacted_thinking" if role == "assistant":
                continue  # nobody here can read it
            case "tool_use" if role == "assistant":
                function = {"name": _text(block, "name", where), "arguments": block.get("input") or {}}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case "tool_result" if role == "user":
                yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": _result(block, where)}
            case other:
                raise _refused(where, f"is of type {shown(other)}, which is not read in a message of {role}")
    if not (parts or calls) and role == "user":
        return
    message: dict[str, Any] = {"role": role, "content": _as_text(parts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    yield {**message, "tool_calls": calls} if calls else message


def _result(block: Mapping[str, Any], location: str) -> str | list[dict[str, Any]]:
    """Return a tool's result as one text, or in parts where it has pictures.

    Templates have no place for a failure, so that the text says it.
    """
    parts, has_failed = [], block.get("is_error")
    for where, part in _blocks(block.get("content") or "", f"{location}.content"):
        parts.append(_picture(part) if part.get("type") == "image" else _words(part, where))
    if not isinstance(has_failed, bool | None):
        raise _refused(f"{location}.is_error", f"is {shown(has_failed)}, and neither true nor false")
    found = _as_text(parts)
    if not has_failed or (isinstance(found, str) and found.startswith("Error")):
        return found
    return f"Error: {found}" if isinstance(found, str) else [{"type": "text", "text": "Error: "}, *found]


def _picture(block: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "image", "source": block.get("source") or {}}


def _as_text(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return parts as one text, a part a line, where they are words alone."""
    return parts if any(map(is_picture, parts)) else text_of(parts)


def _joined(content: Blocks, location: str) -> str:
    """Return blocks of text as one text."""
    return "\n".join(_words(block, where)["text"] for where, block in _blocks(content, location))


def _words(block: Mapping[str, Any], location: str) -> dict[str, Any]:
    if block.get("type") != "text":
        raise _refused(location, f"is of type {shown(block.get('type'))}, and only text is read")
    return {"type": "text", "text": _text(block, "text", location)}


def _blocks(content: Any, location: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if isinstance(content, str):
        yield location, {"type": "text", "text": content}
    elif isinstance(content, list) and all(isinstance(block, Mapping) for block in content):
        for number, block in enumerate(content):
            fields = BLOCK_FIELDS.get(str(block.get("type")))
            if fields is not None:  # other types are refused by name
                _check_known(block, fields | {"type"}, f"{location}.{number}")
            yield f"{location}.{number}", block
    else:
        raise _refused(location, f"is {shown(content)}, and neither a text nor blocks")


def _check_known(fields: Mapping[str, Any], known: Set[str], location: str) -> None:
    """Raise RefusalError for the first field that is not read."""
    unknown = next((name for name in fields if name not in known), None)
    if unknown is not None:
        raise _refused(f"{location}.{unknown}", "is not a field that is read here")


def _text(block: Mapping[str, Any], name: str, location: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise _refused(f"{location}.{name}", f"is {shown(value)}, and no text")
    return value


def _refused(location: str, what: str) -> RefusalError:
    return RefusalError(BAD_REQUEST, f"'{location}' {what}.", field=location)


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

    model: str = ""  # read before the others: `served_model.asked_model`
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

    EMPTY_COUNTS = frozenset({"lora"})
    max_tokens: Length
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None  # which Anthropic's interface has not
    stop_sequences: Items[str] = Field(default_factory=list, max_length=MAX_STOPS)
    lora: Items[LoraScale] | None = None

    def text_options(self) -> TextOptions:
        """Return the options of the text."""
        options: TextOptions = {**super().text_options(), "max_new_tokens": self.max_tokens}
        if self.seed is not None:
            options["seed"] = self.seed
        if self.temperature is not None:
            options["temperature"] = self.temperature
        if self.top_p is not None:
            options["top_p"] = self.top_p
        if self.top_k is not None:
            options["top_k"] = 0 if self.top_k == -1 else self.top_k
        if stops := [stop for stop in self.stop_sequences if stop]:
            options["stop"] = stops
        return options
