"""The options that say how much a command tells people."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from edgespec.cli.console import Console
from edgespec.cli.log_file import open_log
from edgespec.cli.options.files import check_files
from edgespec.cli.options.group import FOLDER, Command, with_options

QUIET_HELP = "Print errors only."
VERBOSE_HELP = "Print the memory plan in full; -vv: and the trace of an error."
LOG_HELP = "Append all messages to this file, with times and with the details of -v; also with -q."


def console_options(*, has_verbose: bool = False, quiet_help: str = QUIET_HELP) -> Callable[[Command], Command]:
    """-q, --log-file, and -v where there is more to say: handed on as `console`.

    Every command that writes files has them, so the files that it names are compared here.
    """

    def decorate(function: Command) -> Command:
        @functools.wraps(function)
        def call(*, quiet: bool, verbose: bool = False, **others: Any) -> Any:
            check_files(others.get("models"))
            return function(console=Console(quiet=quiet, verbose=verbose), **others)

        options = [click.option("-q", "--quiet", is_flag=True, help=quiet_help)]
        if has_verbose:
            options.append(click.option("-v", "--verbose", is_flag=True, help=VERBOSE_HELP))
        # Eager: what is wrong with other options is in the log, too.
        options.append(click.option("--log-file", type=FOLDER, metavar="FILE", callback=_open_log, is_eager=True,
                                    expose_value=False, help=LOG_HELP))  # fmt: skip
        return with_options(call, options)

    return decorate


def _open_log(context: click.Context, _parameter: click.Parameter, value: Path | None) -> None:
    # A value of the configuration that is only being checked belongs to no command line.
    if value is not None and context.parent is not None:
        open_log(value)
