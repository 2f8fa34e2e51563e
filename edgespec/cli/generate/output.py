"""The run itself: each prompt in turn, its text shown as it is verified, its record written when it is done."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.cli.console import Console, print_error, visible
from edgespec.cli.generate.formats import format_record
from edgespec.cli.generate.records import error_record, success_record
from edgespec.cli.generate.requests import EncodeTurn, Request, RunSettings
from edgespec.cli.generate.resume import command_to_continue
from edgespec.cli.generate.sinks import Sink
from edgespec.cli.generate.turns import answer_turns
from edgespec.cli.open_engine import trees_in_words
from edgespec.cli.prefill_line import PrefillLine
from edgespec.cli.spelling import spelled_error
from edgespec.engine import Engine
from edgespec.errors import EXIT_RUNTIME, EXIT_SOME_FAILED, EdgespecError, is_out_of_memory
from edgespec.text.results import GenerationResult, TextChunk

BETWEEN_TURNS = "\n\n"
Show = Callable[[TextChunk], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What all prompts have in common."""

    console: Console
    engine: Engine
    settings: RunSettings
    fields: dict[str, Any]  # of every record
    encode: EncodeTurn
    num_pressed: Callable[[], int]  # how often Ctrl-C was pressed

    def check(self) -> None:
        """Raise KeyboardInterrupt where Ctrl-C was pressed: between two texts nothing is lost."""
        if self.num_pressed():
            raise KeyboardInterrupt


def stream_one(run: Run, request: Request) -> int:
    """Write one prompt's answers to stdout as they are verified, and return the exit status; raises EdgespecError."""
    shown = _Shown(run, to_stdout=True)
    try:
        results = _answer(run, request, shown)
    except KeyboardInterrupt:
        run.console.say(f"\nstopped: interrupted after {shown.num_tokens} tokens")
        raise
    finally:
        shown.end()
    run.console.say(f"{_summary(results)} · stopped: {results[-1].finish_reason} · seed {request.seed}")
    return 0


def write_records(
    run: Run,
    requests: list[Request],
    sink: Sink,
    *,
    format_name: str,
    to_stdout: bool,
    live_text: bool,
    fail_fast: bool,
) -> int:
    """Run every prompt and return the exit status; a record is on the disk before the next prompt starts.

    A prompt that fails does not end the run.

    `format_name` text goes to the sink as plain answers, or streams `to_stdout`.
    """
    console = run.console
    results: list[GenerationResult] = []
    num_done = num_failed = 0
    is_live = live_text or (format_name == "text" and to_stdout)
    with console.progress_bar(wanted=not is_live) as bar:
        task = None if bar is None else bar.add_task("prompts", total=len(requests), note="")

        def draw(text: str) -> None:
            if bar is not None and task is not None:
                bar.update(task, note=text or _summary(results))

        try:
            for number, request in enumerate(requests, 1):
                place = f"[{number}/{len(requests)}] id={visible(request.row.id)}"
                if is_live:
                    console.say(place)
                shown = _Shown(
                    run,
                    place=place,
                    to_stdout=is_live and not live_text,
                    to_stderr=live_text,
                    draw=draw if bar is not None else None,
                )
                record, found = _run_one(run, request, shown)
                results += found
                if format_name == "text":
                    if not to_stdout and not record["error"]:
                        sink.write(BETWEEN_TURNS.join(record["turns"]) + "\n\n")
                else:
                    line = format_record(format_name, request, record)
                    sink.write("" if line is None else json.dumps(line, ensure_ascii=False) + "\n")
                num_done += 1
                num_failed += record["error"] is not None
                if bar is not None and task is not None:
                    bar.update(task, completed=number, note=_summary(results))
                if record["error"] and fail_fast:
                    console.say(f"stopped: --fail-fast; {num_done} of {len(requests)} records are written")
                    return EXIT_RUNTIME
                if number < len(requests):
                    run.check()
        except BaseException as error:
            console.say(f"stopped: {num_done} of {len(requests)} records are written")
            if isinstance(error, KeyboardInterrupt) and not to_stdout and format_name != "text":
                console.say(f"to go on: {command_to_continue()}")
            raise
    failed = f" · {num_failed} failed" if num_failed else ""
    console.say(f"{len(requests)} prompt{'s' * (len(requests) > 1)} · {_summary(results)}{failed}")
    return EXIT_SOME_FAILED if num_failed else 0


def _run_one(run: Run, request: Request, shown: _Shown) -> tuple[dict[str, Any], list[GenerationResult]]:
    """Run one prompt; return its record, and its results if it succeeded."""
    results: list[GenerationResult] = []
    try:
        _answer(run, request, shown, results)
        return success_record(request, run.engine, results, run.fields, run.settings), results
    except OSError:
        raise  # of our own output: what the engine reads comes as EdgespecError
    except Exception as error:
        if os.environ.get("EDGESPEC_DEBUG") and not isinstance(error, EdgespecError):
            raise
        fault = _fault(error)
        print_error(f"{request.row.where}: {fault.what}", fault.fix)
        return error_record(request, results, fault, run.fields), []
    finally:
        shown.end()


def _answer(
    run: Run, request: Request, shown: _Shown, results: list[GenerationResult] | None = None
) -> list[GenerationResult]:
    """Answer all turns; `results` has the finished ones even when a later one fails."""
    results = [] if results is None else results
    engine, room = run.engine, run.engine.room
    for result in answer_turns(run.engine, request, run.encode, on_prefill=shown.prefill, on_chunk=shown):
        results.append(result)
        trees = engine.trees_in_use(result.sampling)
        if trees is not None:
            run.console.detail(trees)
        if len(results) < request.row.num_turns:
            shown.between_turns()
    if engine.room != room:
        now, before = (trees_in_words(tree, is_tuned=engine.is_tuned) for tree in (engine.room, room))
        run.console.say(f"memory ran out in a pass: {now} from here on, no longer {before}")
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
    """Shows one prompt while it runs: its text, or now and then that it goes on."""

    def __init__(
        self,
        run: Run,
        *,
        place: str = "",
        to_stdout: bool = False,
        to_stderr: bool = False,
        draw: Callable[[str], None] | None = None,
    ) -> None:
        self.num_tokens = 0
        self._prefill = PrefillLine(run.console, label=f"{place}: " if place else "", draw=draw)
        self._run, self._place = run, place
        self._stream = sys.stdout if to_stdout else sys.stderr if to_stderr else None
        self._is_terminal = to_stderr or (to_stdout and sys.stdout.isatty())

    def prefill(self, done_tokens: int, num_tokens: int) -> None:
        """Show how much of a turn's prompt is read."""
        self._prefill.update(done_tokens, num_tokens)

    def __call__(self, chunk: TextChunk) -> None:
        """Show one step's text."""
        self._prefill.end()
        self.num_tokens += len(chunk.step.tokens)
        if self._stream is not None:
            self._write(chunk.text)
        else:
            self._run.console.say_sometimes(f"{self._place}: {self.num_tokens} tokens")

    def between_turns(self) -> None:
        """Write a blank line between two answers."""
        self._prefill.begin()
        if self._stream is not None:
            self._write(BETWEEN_TURNS)
        self._run.check()

    def end(self) -> None:
        """End the line where text was written."""
        self._prefill.end()
        if self._stream is not None and self.num_tokens:
            self._write("\n")

    def _write(self, text: str) -> None:
        assert self._stream is not None
        self._stream.write(visible(text) if self._is_terminal else text)
        self._stream.flush()


def _summary(results: Sequence[GenerationResult]) -> str:
    """Return tokens, tokens/s, tokens a pass and passes of all texts together."""
    num_tokens = sum(len(result.token_ids) for result in results)
    total_s = sum(result.total_s for result in results)
    passes = [step for result in results for step in result.passes]
    parts = [f"{num_tokens} tokens"]
    if total_s:
        parts.append(f"{num_tokens / total_s:.1f} tok/s")
    if passes:
        parts.append(f"{sum(len(step.tokens) for step in passes) / len(passes):.2f} tok/pass")
    return " · ".join([*parts, f"{len(passes)} passes"])
