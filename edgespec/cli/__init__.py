"""The command line: knows everything below it, and alone prints, exits and handles signals."""

import gc
import json
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click

from edgespec import __version__
from edgespec.cli.config.groups import ConfiguredGroup
from edgespec.cli.console import print_error
from edgespec.cli.ctrl_c import EXIT_INTERRUPTED, HANG_UP, SAID, Terminated, staying_interrupts
from edgespec.cli.faults import as_edgespec_error, is_debugged, show_trace
from edgespec.cli.log_file import LOG, close_log
from edgespec.cli.standard_streams import StdoutError, forget_rest, open_streams, visible_streams
from edgespec.errors import EXIT_RUNTIME, EXIT_USAGE, EdgespecError
from edgespec.machine.environment import set_up_environment

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
    "serve": "edgespec.cli.serve.command",
    "train": "edgespec.cli.train.command",
}

EPILOG = """\b
Exit codes:
  0  done                        4  model or file not found
  1  failed while running        5  does not fit the memory
  2  wrong usage or input        130, 143  interrupted, terminated
  3  done, but some prompts failed    129  the terminal has gone
"""


@click.group(
    cls=ConfiguredGroup, modules=COMMANDS, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.option("--config", type=click.Path(path_type=Path), help="Read this configuration above the user's own.")
@click.version_option(__version__, prog_name="edgespec")
def cli(*, config: Path | None) -> None:
    """Run language models larger than your card, losslessly and offline."""


def main() -> NoReturn:
    """Run the console script: set up the process, run the command line, and exit with its status."""
    set_up_environment()

    signal.signal(signal.SIGTERM, _terminate)
    if HANG_UP is not None and signal.getsignal(HANG_UP) is signal.SIG_DFL:  # nohup has it ignored
        signal.signal(HANG_UP, _terminate)
    open_streams()
    try:
        sys.exit(run(sys.argv[1:]))
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # else Ctrl-C would replace the status while Python tidies up
        forget_rest()
        gc.freeze()  # else the interpreter looks through all that torch brought once more, for a second


def _terminate(number: int, _frame: FrameType | None) -> None:
    if number == HANG_UP:  # the shell sends one of its own after the terminal's
        signal.signal(number, signal.SIG_IGN)
    raise Terminated(number)


def run(arguments: list[str]) -> int:
    """Run the command line and return the process's exit status."""
    try:
        with visible_streams():
            status = _run(arguments)
        LOG.info("exit status %d", status)
    finally:
        close_log()
    return status


def _run(arguments: list[str]) -> int:
    debug, as_json = is_debugged(arguments), "--json" in arguments
    try:
        with staying_interrupts():
            result: Any = cli.main(args=arguments, prog_name="edgespec", standalone_mode=False)
        sys.stdout.flush()  # what cannot be written is to be known here
    except click.exceptions.Exit as request:
        return request.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return EXIT_USAGE
    except (KeyboardInterrupt, click.Abort) as error:
        return _ended(error, "interrupted", EXIT_INTERRUPTED)
    except Terminated as error:
        number = error.args[0] if error.args else signal.SIGTERM
        return _ended(error, "the terminal has gone" if number == HANG_UP else "terminated", 128 + number)
    except BrokenPipeError:  # the reader of our output has gone
        return EXIT_RUNTIME
    except (click.ClickException, StdoutError) as error:
        return _report(as_edgespec_error(error), as_json=as_json)
    except EdgespecError as error:
        if debug:
            traceback.print_exc()
        return _report(as_edgespec_error(error), as_json=as_json)
    except Exception as error:
        show_trace(debug=debug)
        return _report(as_edgespec_error(error), as_json=as_json)
    return result if isinstance(result, int) else 0


def _ended(error: BaseException, how: str, status: int) -> int:
    """Say that a signal ended the program, unless more was said; return the exit status."""
    causes: BaseException | None = error  # click makes an error of its own
    while causes is not None and SAID not in getattr(causes, "__notes__", ()):
        causes = causes.__cause__
    if causes is None:
        sys.stderr.write(f"stopped: {how}\n")
    return status


def _report(error: EdgespecError, *, as_json: bool) -> int:
    """Write an error to stderr, as its two lines or as one JSON object, and return the exit status."""
    if not as_json:
        print_error(error.what, error.fix)
        return error.exit_code
    what = error.what.rstrip()
    LOG.error("%s %s", what, error.fix)
    sys.stderr.write(json.dumps({"error": {"code": error.code, "message": what, "fix": error.fix}}) + "\n")
    sys.stderr.flush()
    return error.exit_code
