"""The run itself: texts are shown as they are verified, records written when their prompts are done."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Generator
from typing import Any

from edgespec.cli import TOLD, Terminated
from edgespec.cli.console import counted, print_error, visible
from edgespec.cli.generate.formats import format_record
from edgespec.cli.generate.in_order import InOrder
from edgespec.cli.generate.progress import RunProgress
from edgespec.cli.generate.records import error_record, success_record
from edgespec.cli.generate.requests import Request
from edgespec.cli.generate.resume import command_to_continue
from edgespec.cli.generate.sinks import Sink
from edgespec.cli.generate.tally import Tally, summary
from edgespec.cli.generate.together import Ended, Run, say_trees, saying_room, together
from edgespec.cli.generate.turns import RowAnswers
from edgespec.cli.prefill_line import PrefillLine
from edgespec.cli.spelling import spelled_error
from edgespec.errors import EXIT_RUNTIME, EXIT_SOME_FAILED, EdgespecError, is_out_of_memory
from edgespec.text.results import GenerationResult, TextChunk

BETWEEN_TURNS = "\n\n"


def stream_one(run: Run, request: Request) -> int:
    """Write one prompt's answers to stdout as they are verified, and return the exit status; raises EdgespecError."""
    shown = _Shown(run, to_stdout=True)
    try:
        results = _answer(run, request, shown)
    except (KeyboardInterrupt, Terminated) as error:
        run.console.say(f"\nstopped: interrupted after {counted(shown.num_tokens, 'token')} · seed {request.seed}")
        error.add_note(TOLD)
        raise
    finally:
        shown.end()
    run.console.say(f"{summary(results)} · stopped: {results[-1].finish_reason} · seed {request.seed}")
    return 0


def write_records(
    run: Run,
    requests: list[Request],
    sink: Sink,
    *,
    in_order: InOrder | None,
    format_name: str,
    to_stdout: bool,
    live_text: bool,
    fail_fast: bool,
) -> int:
    """Run every prompt and return the exit status; a record is on the disk before the next step.

    Texts are under way together, unless they are shown while they are written. A prompt that fails does not end the
    run. `format_name` text goes to the sink as plain answers, or streams `to_stdout`. With `in_order`, records wait for
    those before them.
    """
    console = run.console
    tally = Tally(requests, max_context=run.engine.max_context)
    is_live = live_text or (format_name == "text" and to_stdout)

    def write(request: Request, record: dict[str, Any]) -> None:
        text = _in_format(format_name, request, record, streams=to_stdout)
        if in_order is not None:
            tally.num_written += in_order.write(request.row.id, text)
        else:
            sink.write(text)
            tally.num_written += 1

    def say_stopped(why: str = "") -> None:
        waiting = "" if in_order is None else in_order.told()
        written = f"{tally.num_written} of {counted(len(requests), 'record')} written"
        console.say(f"stopped{why} with {written}{waiting}")
        if not to_stdout and format_name != "text":
            console.say(f"to go on: {command_to_continue(run.settings.seed)}", breaks=False)

    with console.live_lines(wanted=not is_live) as draw:
        shown = functools.partial(_Shown, run, to_stdout=not live_text)
        progress = RunProgress(console, tally, draw)
        ended = _one_by_one(run, requests, shown) if is_live else together(run, requests, progress)
        try:
            for request, results, error in ended:
                write(request, _record(run, request, results, error))
                tally.add(request, results, failed=error is not None)
                if error is not None and fail_fast:
                    say_stopped(" by --fail-fast")
                    return EXIT_RUNTIME
        except BaseException as error:  # also of a signal
            say_stopped()
            error.add_note(TOLD)
            raise
        finally:
            ended.close()
    failed = f" · {tally.num_failed} failed" if tally.num_failed else ""
    console.say(f"{counted(len(requests), 'prompt')} · {tally.summary()}{failed}")
    return EXIT_SOME_FAILED if tally.num_failed else 0


def _in_format(name: str, request: Request, record: dict[str, Any], *, streams: bool) -> str:
    """Return a record as it is written; empty where the format has nothing for it, or the answers were streamed."""
    if name != "text":
        line = format_record(name, request, record)
        return "" if line is None else json.dumps(line, ensure_ascii=False) + "\n"
    return "" if streams or record["error"] else BETWEEN_TURNS.join(record["turns"]) + "\n\n"


def _one_by_one(run: Run, requests: list[Request], show: Callable[..., _Shown]) -> Generator[Ended, None, None]:
    """Yield each prompt's results, or the error that ended it, while its text is shown."""
    for number, request in enumerate(requests, 1):
        run.check()
        place = f"[{number}/{len(requests)}] id={visible(request.row.id)}"
        run.console.say(place)
        shown, results = show(place=place), list[GenerationResult]()
        try:
            _answer(run, request, shown, results)
        except OSError:
            raise  # of our own output: what the engine reads comes as EdgespecError
        except Exception as error:
            yield request, results, error
        else:
            yield request, results, None
        finally:
            shown.end()


def _record(run: Run, request: Request, results: list[GenerationResult], error: Exception | None) -> dict[str, Any]:
    """Return the record of a prompt; an error is told, and those that are no fault of the user's may be raised."""
    if error is None:
        return success_record(request, run.engine, results, run.fields, run.settings)
    if os.environ.get("EDGESPEC_DEBUG") and not isinstance(error, EdgespecError):
        raise error
    fault = _fault(error)
    print_error(f"{request.row.where}: {fault.what}", fault.fix)
    return error_record(request, results, fault, run.fields)


def _answer(
    run: Run, request: Request, shown: _Shown, results: list[GenerationResult] | None = None
) -> list[GenerationResult]:
    """Answer all turns; `results` has the finished ones even when a later one fails."""
    results = [] if results is None else results
    answers = RowAnswers(run.engine, request, run.encode, on_prefill=shown.prefill)
    with saying_room(run):
        while not answers.is_done:
            handle = answers.next_turn()
            for chunk in handle:
                shown(chunk)
            answers.take(handle)
            results.append(answers.results[-1])
            say_trees(run, results[-1])
            if not answers.is_done:
                shown.between_turns()
    return results


def _fault(error: Exception) -> EdgespecError:
    """Return the error that a user is told of for any failure of one prompt."""
    if isinstance(error, EdgespecError):
        return spelled_error(error)
    if is_out_of_memory(error):
        fix = "Lower --max-gpu-mem, --max-cpu-mem, -ngl or --tree-size."
        return EdgespecError("E_MEMORY", "memory ran out while this prompt ran.", fix)
    what = f"unexpected {type(error).__name__}: {error}"
    return EdgespecError("E_UNEXPECTED", what, "Set EDGESPEC_DEBUG=1 for the trace, and report it.")


class _Shown:
    """Shows one prompt's text while it is written."""

    def __init__(self, run: Run, *, place: str = "", to_stdout: bool) -> None:
        self.num_tokens = 0
        self._prefill = PrefillLine(run.console, label=f"{place}: " if place else "")
        self._run = run
        self._stream = sys.stdout if to_stdout else sys.stderr
        self._is_terminal = not to_stdout or sys.stdout.isatty()

    def prefill(self, done_tokens: int, num_tokens: int) -> None:
        """Show how much of a turn's prompt is read."""
        self._prefill.update(done_tokens, num_tokens)

    def __call__(self, chunk: TextChunk) -> None:
        """Show one step's text."""
        self._prefill.end()
        self.num_tokens += len(chunk.step.tokens)
        self._write(chunk.text)

    def between_turns(self) -> None:
        """Write a blank line between two answers."""
        self._prefill.begin()
        self._write(BETWEEN_TURNS)
        self._run.check()

    def end(self) -> None:
        """End the line where text was written."""
        self._prefill.end()
        if self.num_tokens:
            self._write("\n")

    def _write(self, text: str) -> None:
        self._stream.write(visible(text) if self._is_terminal else text)
        self._stream.flush()
