"""Options of `edgespec chat`."""

from __future__ import annotations

from dataclasses import dataclass

import click

from edgespec.cli.options.distribution import (
    LENGTH_SPELLINGS,
    RAW_HELP,
    SYSTEM_FILE_HELP,
    DrawingOptions,
    read_system,
    require_text,
)
from edgespec.cli.options.engine import EngineOptions
from edgespec.cli.options.model import ModelOptions, PairNamesWithTarget, find_models
from edgespec.cli.options.numbers import WholeNumber
from edgespec.cli.options.record import group, option, settle
from edgespec.text.context import check_length

COLORS = ("auto", "always", "never")
LENGTH_HELP = (
    "Limit each answer to so many tokens; -1: to the context's end. [default: -1; without a chat template 256]"
)
COLOR_HELP = "Colour what is not the answer; NO_COLOR counts."


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions(DrawingOptions):
    """What to say first, how to answer, and how to look."""

    prompt_text: str | None = option("-p", "--prompt", metavar="TEXT", help="Send this message first; - is stdin.")
    single_turn: bool = option("-st", "--single-turn", is_flag=True, help="Leave after one answer, as in a pipe.")
    system: str | None = option("--system", "--system-prompt", "-sys", help="Use this system message.")
    system_file: str | None = option("--system-file", metavar="FILE", help=SYSTEM_FILE_HELP)
    raw: bool = option("--raw", "--ignore-chat-template", is_flag=True, help=RAW_HELP)
    max_new_tokens: int | None = option("-n", *LENGTH_SPELLINGS, type=WholeNumber(), help=LENGTH_HELP)
    history: bool = option(
        "--history/--no-history", default=True, help="Keep what is typed for the next chat. [default: yes]"
    )
    stats: bool = option("--stats/--no-stats", default=True, help="Show a line below every answer. [default: yes]")
    color: str = option("--color", type=click.Choice(COLORS), default="auto", show_default=True, help=COLOR_HELP)

    def __post_init__(self) -> None:
        DrawingOptions.__post_init__(self)
        if self.max_new_tokens is not None:
            check_length(self.max_new_tokens)
        require_text("-p", self.prompt_text or "")
        settle(self, system=read_system(self.system, self.system_file), system_file=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatEngineOptions(EngineOptions):
    """The pair to talk with."""

    models: ModelOptions = group(PairNamesWithTarget, find_models)
