"""The options that say how much a command tells people."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from edgespec.cli.console import Console
from edgespec.cli.options.group import Command, with_options

QUIET_HELP = "Print errors only."
VERBOSE_HELP = "Print the memory plan in full; -vv: and the trace of an error."


def console_options(*, has_verbose: bool = False, quiet_help: str = QUIET_HELP) -> Callable[[Command], Command]:
    """-q, and -v where there is more to say: handed on as `console`."""

    def decorate(function: Command) -> Command:
        @functools.wraps(function)
        def call(*, quiet: bool, verbose: bool = False, **others: Any) -> Any:
            return function(console=Console(quiet=quiet, verbose=verbose), **others)

        options = [click.option("-q", "--quiet", is_flag=True, help=quiet_help)]
        if has_verbose:
            options.append(click.option("-v", "--verbose", is_flag=True, help=VERBOSE_HELP))
        return with_options(call, options)

    return decorate
