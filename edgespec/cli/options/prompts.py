"""The options that say which form a source of prompts has: the same in every command that reads prompts."""

from __future__ import annotations

import functools
from typing import Any

import click

from edgespec.cli.options.group import Command, with_options
from edgespec.cli.prompts.source import FORMS

FORM_HELP = (
    "Form of the prompts. auto goes by the file's suffix; text whose every line is a JSON object is rows too, and "
    "files may be packed (.gz, .bz2, .xz)."
)


def input_options(function: Command) -> Command:
    """Add --lines and --input-format, which are handed on as one `input_form`."""

    @functools.wraps(function)
    def call(*, lines: bool, input_format: str, **others: Any) -> Any:
        if lines and input_format not in {"auto", "lines"}:
            raise click.UsageError(f"--lines is --input-format lines, and {input_format} was given.")
        return function(input_form="lines" if lines else input_format, **others)

    options = [
        click.option("--lines", is_flag=True, help="The file holds one prompt a line."),
        click.option("--input-format", type=click.Choice(FORMS), default="auto", show_default=True, help=FORM_HELP),
    ]
    return with_options(call, options)


def input_flag(form: str) -> str:
    """Return the flag of a form, for messages."""
    return "--lines" if form == "lines" else f"--input-format {form}"
