"""The options of the chat template, which come to the models that are handed on."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from edgespec.cli.options.group import Command, with_options
from edgespec.cli.options.model import ModelOptions
from edgespec.cli.prompts.read import read_text
from edgespec.inputs import parse_json

TEMPLATE_HELP = "Use this chat template: a file, or the name of one of the model's."
ARGUMENT_HELP = "Give this to the chat template, as enable_thinking=false; JSON or text; repeatable."


def template_options(function: Command) -> Command:
    """Add --chat-template and --template-arg, which become part of `models`."""

    @functools.wraps(function)
    def call(*, models: ModelOptions, chat_template: str | None, template_arg: tuple[str, ...], **others: Any) -> Any:
        if others["asked"].raw and (chat_template is not None or template_arg):
            raise click.UsageError("--raw leaves the chat template out: --chat-template and --template-arg are for it.")
        values = {name: value for given in template_arg for name, value in _arguments(given).items()}
        models = replace(models, chat_template=_template(chat_template), template_args=values)
        return function(models=models, **others)

    options = [
        click.option("--chat-template", metavar="FILE|NAME", help=TEMPLATE_HELP),
        click.option(
            "--template-arg", "--chat-template-kwargs", multiple=True, metavar="KEY=VALUE", help=ARGUMENT_HELP
        ),
    ]
    return with_options(call, options)


def _template(given: str | None) -> str | None:
    """Return a file's text, for workers that lack the file, and a name as it is."""
    if given is None or not Path(given).is_file():
        return given
    return read_text(given, what="a file with a chat template, or a name of one")


def _arguments(given: str) -> dict[str, Any]:
    """Return what KEY=VALUE gives, or a whole JSON object, as llama.cpp and vLLM take it."""
    whole = _value(given)
    if isinstance(whole, dict):
        return whole
    name, separator, text = given.partition("=")
    if not separator or not name.strip():
        raise click.UsageError(f"--template-arg '{given}' is no KEY=VALUE.")
    return {name.strip(): _value(text)}


def _value(text: str) -> Any:
    try:
        return parse_json(text, is_strict=True)
    except ValueError:
        return text
