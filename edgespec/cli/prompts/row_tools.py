"""The tools of a row's answers: what the chat template reads of them, and what the answers have to match."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from edgespec.chat.answer import answer_format_of
from edgespec.chat.tools import Toolset, read_tools
from edgespec.cli.prompts.row_settings import RowSettings
from edgespec.sampling.grammar import Grammar

if TYPE_CHECKING:
    from edgespec.pair.pair import ModelPair


def row_tools(pair: ModelPair, own: RowSettings) -> Toolset:
    """Return the tools of a row's answers; raises EdgespecError."""
    return read_tools(
        _values(pair, own).get("tools") or [],
        own.tool_choice or "auto",
        has_parallel_calls=own.parallel_tool_calls is not False,
    )


def template_values(pair: ModelPair, own: RowSettings) -> dict[str, Any]:
    """Return what the chat template reads beside a row's messages; raises EdgespecError for tools that are none."""
    values, toolset = _values(pair, own), row_tools(pair, own)
    values.pop("tools", None)
    return {**values, "tools": toolset.for_template()} if toolset.seen else values


def before_answers(pair: ModelPair, toolset: Toolset, ids: Sequence[int]) -> Toolset:
    """Return the tools of an answer that has a grammar, and whether a thought may stand before it."""
    answer_format = answer_format_of(pair.tokenizer)
    thinks = answer_format is not None and toolset.thought(pair.tokenizer, answer_format, ids) != "none"
    return replace(toolset, ends_with_words=True, thinks=thinks)


def tool_grammar(pair: ModelPair, toolset: Toolset, ids: Sequence[int], answer: Grammar | None) -> Grammar | None:
    """Return what an answer has to match that may call tools, or be an `answer`; None for any; raises EdgespecError."""
    return toolset.grammar(pair.tokenizer, answer_format_of(pair.tokenizer), ids, answer=answer)


def _values(pair: ModelPair, own: RowSettings) -> dict[str, Any]:
    return {**pair.template_args, **(own.template_args or {})}
