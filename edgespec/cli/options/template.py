"""The options of the chat template."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from edgespec.cli.options.numbers import WholeRange
from edgespec.cli.options.record import option, settle
from edgespec.cli.prompts.read import read_text
from edgespec.validation import json_or_text

TEMPLATE_HELP = "Use this chat template: a file, or the name of one of the model's."
ARGUMENT_HELP = "Give this to the chat template, as enable_thinking=false; JSON or text; repeatable."
BUDGET_HELP = "Let an answer think for N tokens at most, then end its thought; 0 is no thought, -1 no bound."
MESSAGE_HELP = "Write this where a thought's tokens are spent, before the model's own words that end it."


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateOptions:
    """The chat template in the place of the target's, and what it reads beside messages."""

    chat_template: str | None = option("--chat-template", metavar="FILE|NAME", help=TEMPLATE_HELP)
    template_arg: tuple[str, ...] = option(
        "--template-arg", "--chat-template-kwargs", multiple=True, metavar="KEY=VALUE", help=ARGUMENT_HELP
    )
    reasoning_budget: int | None = option("--reasoning-budget", type=WholeRange(-1), metavar="N", help=BUDGET_HELP)
    reasoning_budget_message: str = option("--reasoning-budget-message", default="", metavar="TEXT", help=MESSAGE_HELP)
    template: str | None = field(init=False)  # a name, or a file's text, for workers that lack the file
    values: Mapping[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        values = {name: value for text in self.template_arg for name, value in _arguments(text).items()}
        if self.reasoning_budget_message and self.reasoning_budget in (None, -1):
            raise click.UsageError("--reasoning-budget-message needs --reasoning-budget.")
        settle(self, template=_template(self.chat_template), values=values)

    def check(self, *, raw: bool) -> None:
        """Raise click.UsageError where --raw leaves out what was given."""
        if raw and self.reasoning_budget not in (None, -1):
            raise click.UsageError("--raw leaves the chat template out, which says what a thought is.")
        if raw and (self.chat_template is not None or self.template_arg):
            raise click.UsageError("--raw leaves the chat template out: --chat-template and --template-arg are for it.")


def _template(argument: str | None) -> str | None:
    if argument is None or not Path(argument).is_file():
        return argument
    return read_text(argument, what="a file with a chat template, or a name of one")


def _arguments(argument: str) -> dict[str, Any]:
    """Return what KEY=VALUE gives, or a whole JSON object, as llama.cpp and vLLM take it."""
    whole = json_or_text(argument, is_strict=True)
    if isinstance(whole, dict):
        return whole
    name, separator, text = argument.partition("=")
    if not separator or not name.strip():
        raise click.UsageError(f"--template-arg '{argument}' is no KEY=VALUE.")
    return {name.strip(): json_or_text(text, is_strict=True)}
