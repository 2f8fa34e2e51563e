"""The run itself: texts are shown as they are verified, records written when their prompts are done."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from edgespec.cli.console import Console, DrawLines, counted, print_error
from edgespec.cli.ctrl_c import SAID, Terminated
from edgespec.cli.faults import as_edgespec_error, memory_error
from edgespec.cli.generate.batched import RowEnd, Run, say_trees, saying_room
from edgespec.cli.generate.formats import format_record
from edgespec.cli.generate.in_order import InOrder
from edgespec.cli.generate.records import error_record, success_record
from edgespec.cli.generate.requests import Request
from edgespec.cli.generate.resume import command_to_continue
from edgespec.cli.generate.sinks import Sink
from edgespec.cli.generate.tally import Tally, Totals, totals
from edgespec.cli.generate.turns import RowAnswers
from edgespec.cli.prefill_line import PrefillLine
from edgespec.cli.spelling import spelled_error
from edgespec.cli.standard_streams import result_stream
from edgespec.errors import EXIT_RUNTIME, EXIT_SOME_FAILED, EdgespecError, is_out_of_memory
from edgespec.files import json_text
from edgespec.text.results import GenerationResult, TextChunk

BETWEEN_TURNS = "\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRecord:
    """A prompt that is done, with its record."""

    request: Request
    record: dict[str, Any]
    totals: Totals  # of its answers

    @property
    def failed(self) -> bool:
        """Return whether the record tells of an error."""
        return self.record["error"] is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordOutput:
    """Where records go, and in which form."""

    sink: Sink
    in_order: InOrder | None  # records wait for those before them there
    format_name: str  # `text` is plain answers, or nothing where they stream to stdout
    to_stdout: bool
    seed: int  # of the run, to go on with


def stream_one(run: Run, request: Request) -> int:
    """Write one prompt's answers to stdout as they are verified, and return the exit status; raises EdgespecError."""
    shown = _Shown(run, to_stdout=True)
    try:
        results = _answer(run, request, shown)
    except (KeyboardInterrupt, Terminated) as error:
        run.console.say(f"\nstopped: interrupted after {counted(shown.num_tokens, 'token')} · seed {request.seed}")
        error.add_note(SAID)
        raise
    finally:
        shown.end()
    run.console.say(f"{totals(results).in_words()} · stopped: {results[-1].finish_reason} · seed {request.seed}")
    return 0


def write_records(
    console: Console,
    answer: Callable[[DrawLines], Generator[RowRecord, None, None]],
    tally: Tally,
    output: RecordOutput,
    *,
    shows_progress: bool,
    fail_fast: bool,
) -> int:
    """Write the record of every prompt and return the exit status; it is on the disk before the next step.

    `answer` returns the prompts as they are done, and may draw how it goes. A prompt that fails does not end the run,
    unless `fail_fast` says so.
    """

    def say_stopped(why: str = "") -> None:
        waiting = "" if output.in_order is None else output.in_order.told()
        written = f"{tally.num_written} of {counted(tally.num_prompts, 'record')} written"
        console.say(f"stopped{why} with {written}{waiting}")
        if output.sink.can_resume:
            console.say(f"to go on: {command_to_continue(output.seed)}", breaks=False)

    with console.live_lines(is_shown=shows_progress) as draw, closing(answer(draw)) as answered:
        try:
            for one in answered:
                _write(one, tally, output)
                if one.failed and fail_fast:
                    say_stopped(" by --fail-fast")
                    return EXIT_RUNTIME
        except BaseException as error:  # also of a signal
            say_stopped()
            error.add_note(SAID)
            raise
    failed = f" · {tally.num_failed} failed" if tally.num_failed else ""
    console.say(f"{counted(tally.num_prompts, 'prompt')} · {tally.summary()}{failed}")
    return EXIT_SOME_FAILED if tally.num_failed else 0


def _write(one: RowRecord, tally: Tally, output: RecordOutput) -> None:
    """Write a record, and tell of an error that it holds."""
    text = _in_format(output.format_name, one.request, one.record, streams=output.to_stdout)
    if output.in_order is not None:
        tally.num_written += output.in_order.write(one.request.row.id, text)
    else:
        output.sink.write(text)
        tally.num_written += 1
    tally.add(one.request, one.totals, failed=one.failed)
    if one.failed:
        error = one.record["error"]
        print_error(f"{one.request.row.where}: {error['message']}", error["fix"])


def with_record(run: Run, ended: RowEnd) -> RowRecord:
    """Return a prompt that ended with its record."""
    request, results, error = ended
    record = _record(run, request, results, error)
    return RowRecord(request=request, record=record, totals=totals(results if error is None else ()))


def with_records(run: Run, ended: Generator[RowEnd, None, None]) -> Generator[RowRecord, None, None]:
    """Yield the prompts that ended with their records."""
    with closing(ended):
        for one in ended:
            yield with_record(run, one)


def _in_format(name: str, request: Request, record: dict[str, Any], *, streams: bool) -> str:
    """Return a record as it is written; empty where the format has nothing for it, or the answers were streamed."""
    if name != "text":
        line = format_record(name, request, record)
        return "" if line is None else json_text(line) + "\n"
    return "" if streams or record["error"] else BETWEEN_TURNS.join(record["turns"]) + "\n\n"


def one_by_one(run: Run, requests: list[Request], *, to_stdout: bool) -> Generator[RowEnd, None, None]:
    """Yield each prompt's results, or the error that ended it, while its text is shown."""
    for number, request in enumerate(requests, 1):
        run.check()
        place = f"[{number}/{len(requests)}] id={request.row.id}"
        run.console.say(place)
        shown, results = _Shown(run, place=place, to_stdout=to_stdout), list[GenerationResult]()
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
    return error_record(request, results, _fault(error), run.fields)


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
        return memory_error("memory ran out while this prompt ran.", fix)
    return as_edgespec_error(error)


class _Shown:
    """Shows one prompt's text while it is written."""

    def __init__(self, run: Run, *, place: str = "", to_stdout: bool) -> None:
        self.num_tokens = 0
        self._prefill = PrefillLine(run.console, label=f"{place}: " if place else "")
        self._run = run
        self._to_stdout = to_stdout

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
        stream = result_stream() if self._to_stdout else sys.stderr
        stream.write(text)
        stream.flush()
