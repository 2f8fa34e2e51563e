"""The command line: knows everything below it, and alone prints, exits and handles signals."""

from __future__ import annotations

import gc
import io
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click

from edgespec import __version__
from edgespec.cli.config.groups import ConfiguredGroup, leaf_commands
from edgespec.cli.console import print_error
from edgespec.cli.spelling import spelled_error
from edgespec.errors import EXIT_MEMORY, EXIT_RUNTIME, EXIT_USAGE, EdgespecError, is_out_of_memory

EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143
COMMANDS = {  # name -> the module that holds `command`
    "bench": "edgespec.cli.bench.command",
    "cache": "edgespec.cli.cache",
    "chat": "edgespec.cli.chat.command",
    "completion": "edgespec.cli.completion",
    "config": "edgespec.cli.config.command",
    "doctor": "edgespec.cli.doctor",
    "estimate": "edgespec.cli.estimate.command",
    "generate": "edgespec.cli.generate.command",
    "models": "edgespec.cli.models.command",
    "profile": "edgespec.cli.profile.command",
    "train": "edgespec.cli.train.command",
}

EPILOG = """\b
Exit codes:
  0  done                        4  model or file not found
  1  failed while running        5  does not fit the memory
  2  wrong usage or input        130, 143  interrupted, terminated
  3  done, but some prompts failed
"""


def all_commands(context: click.Context) -> dict[str, click.Command]:
    """Return every command by its name, imported; a command of the group `train` is called `train head`."""
    del context  # whichever of the program's commands asks
    return leaf_commands(click.Context(cli, info_name="edgespec"))


@click.group(
    cls=ConfiguredGroup, modules=COMMANDS, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.option("--config", type=click.Path(path_type=Path), help="Read this configuration above the user's own.")
@click.version_option(__version__, prog_name="edgespec")
def cli(*, config: Path | None) -> None:
    """Run language models larger than your card, losslessly and offline."""


class _Terminated(BaseException):
    """SIGTERM raises this, so that it unwinds like an interrupt and files are closed."""


def main() -> NoReturn:
    """Run the console script: set up the process, run the command line, and exit with its status."""
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
    status = run(sys.argv[1:])
    gc.freeze()  # else the interpreter looks through all that torch brought once more, for a second
    sys.exit(status)


def run(arguments: list[str]) -> int:
    """Run the command line and return the process's exit status."""
    debug = bool(os.environ.get("EDGESPEC_DEBUG")) or "-vv" in arguments
    as_json = "--json" in arguments
    try:
        result: Any = cli.main(args=arguments, prog_name="edgespec", standalone_mode=False)
    except EdgespecError as error:
        if debug:
            traceback.print_exc()
        said = spelled_error(error)
        _report(said.code, said.what, said.fix, as_json=as_json)
        return error.exit_code
    except click.exceptions.Exit as request:
        return request.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return EXIT_USAGE
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "edgespec"
        _report("E_USAGE", error.format_message(), f"{path} --help", as_json=as_json)
        return EXIT_USAGE
    except click.ClickException as error:
        _report("E_USAGE", error.format_message(), "edgespec --help", as_json=as_json)
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
        _report(
            "E_MEMORY",
            "memory ran out.",
            "Set --max-cpu-mem below what is free, or lower --tree-size.",
            as_json=as_json,
        )
        return EXIT_MEMORY
    except Exception as error:
        if debug:
            traceback.print_exc()
        if is_out_of_memory(error):
            fix = "Lower --max-gpu-mem, -ngl or --tree-size."
            _report("E_MEMORY", "the device's memory ran out.", fix, as_json=as_json)
            return EXIT_MEMORY
        what = f"unexpected {type(error).__name__}: {error}"
        _report("E_UNEXPECTED", what, "Set EDGESPEC_DEBUG=1 for the trace, and report it.", as_json=as_json)
        return EXIT_RUNTIME
    return result if isinstance(result, int) else 0


def _report(code: str, what: str, fix: str, *, as_json: bool) -> None:
    """Write an error to stderr: its two lines, or one JSON object in their place."""
    if not as_json:
        print_error(what, fix)
        return
    sys.stderr.write(json.dumps({"error": {"code": code, "message": what.rstrip(), "fix": fix}}) + "\n")
    sys.stderr.flush()
