"""Options of `edgespec chat` alone, handed on as one value."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from edgespec.cli.options.distribution import LENGTH_SPELLINGS, check_stops, distribution_options, require_text
from edgespec.cli.options.group import Command, with_options
from edgespec.cli.options.numbers import WholeNumber, WholeRange
from edgespec.cli.prompts.read import read_text
from edgespec.config import MAX_SEED, require

COLORS = ("auto", "always", "never")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """What to say first, how to answer, and how to look."""

    prompt: str | None  # of the first turn; - is stdin
    is_single_turn: bool
    system: str | None
    raw: bool
    chosen: dict[str, Any]  # fields of `SamplingSettings` that were given
    max_new_tokens: int | None
    seed: int | None
    stop: tuple[str, ...]
    keeps_history: bool
    stats: bool
    color: str


def chat_options(function: Command) -> Command:
    """Add the options of messages, sampling and looks, which are handed on as `asked`."""

    @functools.wraps(function)
    def call(
        *,
        prompt_text: str | None,
        single_turn: bool,
        system: str | None,
        system_file: str | None,
        raw: bool,
        max_new_tokens: int | None,
        chosen: dict[str, Any],
        seed: int | None,
        stop: tuple[str, ...],
        history: bool,
        stats: bool,
        color: str,
        **others: Any,
    ) -> Any:
        if system is not None and system_file is not None:
            raise click.UsageError("Give one system message: --system or --system-file.")
        if system_file is not None:
            system = read_text(system_file, what="a text file").removesuffix("\n")
        require(
            max_new_tokens is None or max_new_tokens == -1 or max_new_tokens >= 1,
            f"--max-new-tokens {max_new_tokens} is not a length.",
            "Use 1 or more, or -1 for all that fits.",
        )
        check_stops(stop)
        for flag, text in (("-p", prompt_text), ("--system", system)):
            require_text(flag, text or "")
        asked = ChatOptions(
            prompt=prompt_text,
            is_single_turn=single_turn,
            system=system or None,
            raw=raw,
            chosen=chosen,
            max_new_tokens=max_new_tokens,
            seed=seed,
            stop=stop,
            keeps_history=history,
            stats=stats,
            color=color,
        )
        return function(asked=asked, **others)

    options: list[Callable[[Command], Command]] = [
        click.option("-p", "--prompt", "prompt_text", metavar="TEXT", help="The first message; - is stdin."),
        click.option("-st", "--single-turn", is_flag=True, help="Leave after one answer, as in a pipe."),
        click.option("--system", "--system-prompt", "-sys", help="The system message."),
        click.option("--system-file", metavar="FILE", help="The same, from a file."),
        click.option("--raw", "--ignore-chat-template", "raw", is_flag=True,
                     help="Do not apply the model's chat template."),
        click.option("-n", *LENGTH_SPELLINGS, "max_new_tokens", type=WholeNumber(),
                     help="Of each answer; -1: to the context's end. [default: -1; without a chat template 256]"),
        distribution_options(has_greedy=True),
        click.option("--seed", type=WholeRange(0, MAX_SEED, has_off=True),
                     help="Of every answer's draws; /regen takes the next. [default: random]"),
        click.option("--stop", multiple=True, metavar="STR",
                     help="End an answer before this string, which is left out; repeatable."),
        click.option("--history/--no-history", default=True,
                     help="Keep what is typed for the next chat. [default: yes]"),
        click.option("--stats/--no-stats", default=True, help="A line below every answer. [default: yes]"),
        click.option("--color", type=click.Choice(COLORS), default="auto", show_default=True,
                     help="Of what is not the answer; NO_COLOR counts."),
    ]  # fmt: skip
    return with_options(call, options)
