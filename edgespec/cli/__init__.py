"""The command line: `edgespec COMMAND`. The only room that prints, exits or handles signals."""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys
from types import FrameType
from typing import Any, NoReturn

import click

from edgespec import __version__
from edgespec.cli.console import print_error
from edgespec.errors import EXIT_MEMORY, EXIT_RUNTIME, EXIT_USAGE, EdgespecError

EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143
COMMANDS = {  # name -> the module that holds `command`
    "estimate": "edgespec.cli.estimate",
    "generate": "edgespec.cli.generate",
    "profile": "edgespec.cli.profile",
    "train": "edgespec.cli.train",
}

EPILOG = """\b
Exit codes:
  0  done                        4  model or file not found
  1  failed while running        5  does not fit the memory
  2  wrong usage or input        130, 143  interrupted, terminated
  3  done, but some prompts failed
"""


class _LazyGroup(click.Group):
    """Imports a command's module when it is used, so that --help stays fast."""

    def list_commands(self, _context: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return super().get_command(context, name)
        command: click.Command = importlib.import_module(COMMANDS[name]).command
        return command


@click.group(
    cls=_LazyGroup,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "EDGESPEC"},
)
@click.version_option(__version__, prog_name="edgespec")
def cli() -> None:
    """Run language models larger than your card, losslessly and offline."""


class _Terminated(BaseException):
    """SIGTERM, unwound like an interrupt so that files are closed."""


def main() -> NoReturn:
    """The console script."""
    # Read once by huggingface_hub and transformers when they are imported: nothing reaches for the network.
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

    def terminate(_signal: int, _frame: FrameType | None) -> None:
        raise _Terminated

    signal.signal(signal.SIGTERM, terminate)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a Windows console's own encoding lacks most characters
            stream.reconfigure(encoding="utf-8", errors="replace")
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run the command line; the process's exit status."""
    debug = bool(os.environ.get("EDGESPEC_DEBUG"))
    try:
        result: Any = cli.main(args=arguments, prog_name="edgespec", standalone_mode=False)
    except EdgespecError as error:
        if debug:
            raise
        print_error(error.what, error.fix)
        return error.exit_code
    except click.exceptions.Exit as request:
        return request.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return EXIT_USAGE
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "edgespec"
        print_error(error.format_message(), f"{path} --help")
        return EXIT_USAGE
    except click.ClickException as error:
        print_error(error.format_message(), "edgespec --help")
        return EXIT_USAGE
    except (KeyboardInterrupt, click.Abort):
        return EXIT_INTERRUPTED
    except _Terminated:
        return EXIT_TERMINATED
    except BrokenPipeError:
        # Whoever read our output has gone; point stdout elsewhere so that closing it stays quiet.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_RUNTIME
    except MemoryError:
        print_error("memory ran out.", "Set --max-cpu-mem below what is free, or lower --tree-size.")
        return EXIT_MEMORY
    except Exception as error:
        if debug:
            raise
        if type(error).__name__ == "OutOfMemoryError":  # torch's, which is not imported for its name alone
            print_error("the device's memory ran out.", "Lower --max-gpu-mem, -ngl or --tree-size.")
            return EXIT_MEMORY
        print_error(f"unexpected {type(error).__name__}: {error}", "Set EDGESPEC_DEBUG=1 for the trace, and report it.")
        return EXIT_RUNTIME
    return result if isinstance(result, int) else 0
