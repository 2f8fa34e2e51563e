"""The options that set how much a command prints."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click

from edgespec.cli.console import Console
from edgespec.cli.log_file import open_log
from edgespec.cli.options.record import FOLDER, Command, option, options_of

QUIET_HELP = "Print results and errors only."
VERBOSE_HELP = "Print the memory plan in full; -vv: and the trace of an error."
LOG_HELP = "Append all messages to this file, with times and with the details of -v; also with -q."


def _open_log(context: click.Context, _parameter: click.Parameter, value: Path | None) -> Path | None:
    # A value of the configuration that is only being checked belongs to no command line.
    if value is not None and context.parent is not None:
        open_log(value)
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleOptions:
    """How much to say, and where else."""

    quiet: bool = option("-q", "--quiet", is_flag=True, help=QUIET_HELP)
    # Eager: errors of other options are in the log, too.
    log_file: Path | None = option(
        "--log-file", type=FOLDER, metavar="FILE", callback=_open_log, is_eager=True, help=LOG_HELP
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class VerboseConsoleOptions(ConsoleOptions):
    """The same, where there is more to say."""

    verbose: bool = option("-v", "--verbose", is_flag=True, help=VERBOSE_HELP)


def console_options(*, has_verbose: bool = False) -> Callable[[Command], Command]:
    """Add -q, --log-file, and -v where there is more to say: the command is given its `console`."""
    record = VerboseConsoleOptions if has_verbose else ConsoleOptions
    return options_of(record, handed_on_as="console", made=_console)


def _console(options: ConsoleOptions) -> Console:
    return Console(quiet=options.quiet, verbose=isinstance(options, VerboseConsoleOptions) and options.verbose)
