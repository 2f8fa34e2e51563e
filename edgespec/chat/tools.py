"""Tools of one answer: those that the model sees, how its calls are enforced, and how an answer with calls is told."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from edgespec.chat.answer import AnswerFormat, AnswerPart, AnswerReader, Tool, ToolCall, answer_format_of
from edgespec.chat.answer_frame import Thought, framed, thought_behind
from edgespec.chat.call_grammar import calls_or_answer, forced_calls, strict_calls
from edgespec.errors import EdgespecError
from edgespec.sampling.grammar import Grammar
from edgespec.validation import shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from edgespec.model.picture_prompt import PicturePrompt
    from edgespec.pair.pair import ModelPair
    from edgespec.sampling.thought_budget import ThoughtBudget
    from edgespec.text.request import Config, TextOptions, TextRequest

CHOICES = ("none", "auto", "required")
PROMPT_END = 64  # tokens of a prompt that may begin a part of the answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolset:
    """The tools of an answer."""

    seen: Sequence[Tool] = ()
    forced: Sequence[Tool] = ()  # of which one has to be called
    has_one_call: bool = False  # an answer ends with its first call
    ends_with_words: bool = False  # an answer that does not call has a grammar of its own
    thinks: bool = False  # a thought may stand before such an answer

    @property
    def enforces(self) -> str | None:
        """Return the field that asks for a grammar; None where any words and calls may come."""
        is_strict = any(tool["function"].get("strict") for tool in self.seen)
        return "tool_choice" if self.forced else "strict" if is_strict else None

    @property
    def has_parts(self) -> bool:
        """Return whether an answer is told apart into what is thought, what is said, and calls."""
        return bool(self.seen) or self.thinks

    def for_template(self) -> list[dict[str, Any]]:
        """Return the tools as chat templates read them: what is enforced is no word of the prompt."""
        return [
            {**tool, "function": {name: value for name, value in tool["function"].items() if name != "strict"}}
            for tool in self.seen
        ]

    def grammar(
        self,
        tokenizer: PreTrainedTokenizerBase,
        answer_format: AnswerFormat | None,
        ids: Sequence[int],
        *,
        answer: Grammar | None = None,
    ) -> Grammar | None:
        """Return what an answer to a prompt of these ids has to match, None for any words and calls.

        An `answer` that does not call may have a grammar itself. Raises EdgespecError where the family has no JSON
        calls.
        """
        if not self.enforces and (answer is None or (answer_format is None and not self.seen)):
            return answer
        thought = self.thought(tokenizer, answer_format, ids)
        if self.forced:
            return forced_calls(answer_format, self.forced, thought)
        if answer is None:
            return strict_calls(answer_format, self.seen, thought)
        if self.seen:
            return calls_or_answer(answer_format, self.seen, answer, thought)
        return answer if answer_format is None else framed(answer_format, answer, thought)

    def request(
        self,
        prompt: list[int] | PicturePrompt,
        *,
        pair: ModelPair,
        max_context: int,
        options: TextOptions,
        config: Config | None = None,
    ) -> TextRequest:
        """Return the request of an answer to messages of these ids, perhaps with pictures.

        A grammar is the answer's, behind what is thought. Raises EdgespecError.
        """
        from edgespec.text.request import chosen_grammar, chosen_reasoning, text_request  # a help text has no time

        found, ids = dict(options), prompt if isinstance(prompt, list) else prompt.ids
        most, message = chosen_reasoning(found)
        answer_format, answer = answer_format_of(pair.tokenizer), chosen_grammar(found)
        found["grammar"] = self.grammar(pair.tokenizer, answer_format, ids, answer=answer)
        request = text_request(
            prompt, pair=pair, max_context=max_context, config=config, options=cast("TextOptions", found)
        )
        return replace(request, thought_budget=self.budget(pair, ids, most, message))

    def budget(
        self, pair: ModelPair, ids: Sequence[int], most: int | None = None, message: str = ""
    ) -> ThoughtBudget | None:
        """Return the budget of an answer to messages of these ids, where it has one or the pair does.

        Raises EdgespecError where the family writes no thoughts.
        """
        from edgespec.chat.thinking import thought_budget

        most = pair.reasoning_budget if most is None else most
        if most in (None, -1):
            return None
        answer_format = answer_format_of(pair.tokenizer)
        thought, message = self.thought(pair.tokenizer, answer_format, ids), message or pair.reasoning_budget_message
        return thought_budget(pair.tokenizer, answer_format, thought, most, message)

    def reader(
        self, tokenizer: PreTrainedTokenizerBase, answer_format: AnswerFormat | None, ids: Sequence[int]
    ) -> AnswerReader:
        """Return a reader of the answer to a prompt of these ids."""
        return AnswerReader(
            answer_format,
            prompt_end=_end_of(tokenizer, ids),
            tools=self.seen,
            has_one_call=self.has_one_call,
            ends_with_words=self.ends_with_words,
        )

    def thought(
        self, tokenizer: PreTrainedTokenizerBase, answer_format: AnswerFormat | None, ids: Sequence[int]
    ) -> Thought:
        """Return whether a prompt of these ids leaves a thought open, or one may come, before the answer."""
        if answer_format is None:
            return "none"
        is_thinking = self.reader(tokenizer, answer_format, ids).is_thinking
        return thought_behind(answer_format, _end_of(tokenizer, ids), is_thinking=is_thinking)

    def message(self, tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], text: str) -> dict[str, Any]:
        """Return a whole answer to a prompt of these ids, in OpenAI's form."""
        return message_of(self._parts(tokenizer, ids, text))

    def num_thought(self, pair: ModelPair, ids: Sequence[int], tokens: Sequence[int]) -> int:
        """Return how many of an answer's tokens are thought, behind a prompt of these ids."""
        from edgespec.chat.thinking import num_thought  # a help text has no time

        answer_format = answer_format_of(pair.tokenizer)
        return num_thought(pair, self.reader(pair.tokenizer, answer_format, ids), answer_format, tokens)

    def _parts(self, tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], text: str) -> list[AnswerPart]:
        reader = self.reader(tokenizer, answer_format_of(tokenizer), ids)
        return [*reader.feed(text), *reader.end()]


def _end_of(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids[-PROMPT_END:])))


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


def read_tools(tools: Any, choice: Any = "auto", *, has_parallel_calls: bool = True) -> Toolset:
    """Return the tools of an answer as OpenAI's `tools` and `tool_choice` say it; raises EdgespecError."""
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise _wrong(f"tools {shown(tools)} is no list of objects.")
    for number, tool in enumerate(tools):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict) or not _is_name(function.get("name")):
            raise _wrong(f"tools.{number} {shown(tool)} is no function with a name.")
        for field, kind in (("parameters", dict), ("strict", bool)):
            if not isinstance(function.get(field), kind | None):
                raise _wrong(f"tools.{number}.function.{field} {shown(function[field])} is wrong.")
    function = choice.get("function") if isinstance(choice, dict) else None
    if isinstance(function, dict) and choice.get("type") == "function":
        return chosen_tools(tools, "named", function.get("name"), has_parallel_calls=has_parallel_calls)
    if choice not in CHOICES:
        what = f"tool_choice {shown(choice)} is none of {', '.join(CHOICES)}, and no function."
        raise EdgespecError(
            "E_SETTING", what, 'Write one of them, or {"type": "function", "function": {"name": NAME}}.'
        )
    return chosen_tools(tools, choice, has_parallel_calls=has_parallel_calls)


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
    content, thought = ("".join(part.text for part in parts if part.kind == kind) for kind in ("content", "reasoning"))
    message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
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
