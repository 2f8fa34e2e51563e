"""Tools of one answer: those that the model sees, how its calls are enforced, and how an answer with calls is told."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edgespec.chat.answer import AnswerForm, AnswerPart, AnswerReader, Tool, ToolCall, answer_form
from edgespec.chat.call_grammar import calls_or_answer, forced_calls, strict_calls
from edgespec.errors import EdgespecError
from edgespec.inputs import shown
from edgespec.sampling.grammar import Grammar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHOICES = ("none", "auto", "required")
PROMPT_END = 64  # tokens of a prompt that may begin a part of the answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolset:
    """The tools of an answer."""

    seen: Sequence[Tool] = ()
    forced: Sequence[Tool] = ()  # of which one has to be called
    has_one_call: bool = False  # an answer ends with its first call
    ends_with_words: bool = False  # an answer that does not call has a grammar of its own

    @property
    def enforces(self) -> str | None:
        """Return the field that asks for a grammar; None where any words and calls may come."""
        is_strict = any(tool["function"].get("strict") for tool in self.seen)
        return "tool_choice" if self.forced else "strict" if is_strict else None

    def for_template(self) -> list[dict[str, Any]]:
        """Return the tools as chat templates read them: what is enforced is no word of the prompt."""
        return [
            {**tool, "function": {name: value for name, value in tool["function"].items() if name != "strict"}}
            for tool in self.seen
        ]

    def grammar(
        self,
        tokenizer: PreTrainedTokenizerBase,
        form: AnswerForm | None,
        ids: Sequence[int],
        *,
        answer: Grammar | None = None,
    ) -> Grammar | None:
        """Return what an answer to a prompt of these ids has to match, None for any words and calls.

        An `answer` that does not call may have a grammar itself. Raises EdgespecError where the family has no JSON
        calls.
        """
        if not self.enforces and (answer is None or not self.seen):
            return answer
        is_thinking = self.reader(tokenizer, form, ids).is_thinking
        if self.forced:
            return forced_calls(form, self.forced, is_thinking=is_thinking)
        if answer is not None:
            return calls_or_answer(form, self.seen, answer, is_thinking=is_thinking)
        return strict_calls(form, self.seen, is_thinking=is_thinking)

    def reader(self, tokenizer: PreTrainedTokenizerBase, form: AnswerForm | None, ids: Sequence[int]) -> AnswerReader:
        """Return a reader of the answer to a prompt of these ids."""
        end = str(tokenizer.decode(list(ids[-PROMPT_END:])))
        return AnswerReader(
            form,
            prompt_end=end,
            tools=self.seen,
            has_one_call=self.has_one_call,
            ends_with_words=self.ends_with_words,
        )

    def message(self, tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], text: str) -> dict[str, Any]:
        """Return a whole answer to a prompt of these ids, in OpenAI's form."""
        reader = self.reader(tokenizer, answer_form(tokenizer), ids)
        return message_of([*reader.feed(text), *reader.end()])


def chosen_tools(
    tools: Sequence[Tool], choice: str = "auto", named: str | None = None, *, has_parallel_calls: bool = True
) -> Toolset:
    """Return the tools of an answer by OpenAI's `tool_choice`: none, auto, required, or named; raises EdgespecError."""
    forced = tools if choice == "required" else [tool for tool in tools if tool["function"]["name"] == named]
    if choice == "named" and not forced:
        raise _wrong(f"tool_choice names {shown(named)}, and there is no such tool.")
    if choice == "required" and not forced:
        raise _wrong("tool_choice requires a call, and there are no tools.")
    if choice == "none":
        return Toolset()
    return Toolset(
        seen=tools, forced=forced if choice != "auto" else (), has_one_call=choice == "named" or not has_parallel_calls
    )


def read_tools(given: Any, choice: Any = "auto", *, has_parallel_calls: bool = True) -> Toolset:
    """Return the tools of an answer as OpenAI's `tools` and `tool_choice` say it; raises EdgespecError."""
    if not isinstance(given, list) or not all(isinstance(tool, dict) for tool in given):
        raise _wrong(f"tools {shown(given)} is no list of objects.")
    for number, tool in enumerate(given):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict) or not _is_name(function.get("name")):
            raise _wrong(f"tools.{number} {shown(tool)} is no function with a name.")
        for field, kind in (("parameters", dict), ("strict", bool)):
            if not isinstance(function.get(field), kind | None):
                raise _wrong(f"tools.{number}.function.{field} {shown(function[field])} is wrong.")
    function = choice.get("function") if isinstance(choice, dict) else None
    if isinstance(function, dict) and choice.get("type") == "function":
        return chosen_tools(given, "named", function.get("name"), has_parallel_calls=has_parallel_calls)
    if choice not in CHOICES:
        what = f"tool_choice {shown(choice)} is none of {', '.join(CHOICES)}, and no function."
        raise EdgespecError(
            "E_SETTING", what, 'Write one of them, or {"type": "function", "function": {"name": NAME}}.'
        )
    return chosen_tools(given, choice, has_parallel_calls=has_parallel_calls)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _wrong(what: str) -> EdgespecError:
    fix = 'Write tools as [{"type": "function", "function": {"name": NAME, "parameters": SCHEMA}}, ...].'
    return EdgespecError("E_SETTING", what, fix)


def call_id(kind: str) -> str:
    """Return the id of a call, which its result names."""
    return f"{kind}_{secrets.token_hex(12)}"


def message_of(parts: Sequence[AnswerPart]) -> dict[str, Any]:
    """Return an answer as OpenAI writes it."""
    calls = [call_fields(part.call) for part in parts if part.call is not None]
    said, thought = ("".join(part.text for part in parts if part.kind == kind) for kind in ("content", "reasoning"))
    message: dict[str, Any] = {"role": "assistant", "content": said if said or not calls else None}
    if thought:
        message["reasoning_content"] = thought
    return {**message, "tool_calls": calls} if calls else message


def call_fields(call: ToolCall) -> dict[str, Any]:
    """Return a call as OpenAI writes it."""
    return {"id": call_id("call"), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def call_line(call: Mapping[str, Any]) -> str:
    """Return a call as one line for people: the function's name and its arguments."""
    function = call["function"]
    return f"{function['name']} {' '.join(str(function['arguments']).split())}"


def shown_parts(parts: Sequence[AnswerPart]) -> str:
    """Return parts of an answer for people: each call is a line."""
    return "".join(part.text if part.call is None else f"\n{call_line(call_fields(part.call))}\n" for part in parts)
