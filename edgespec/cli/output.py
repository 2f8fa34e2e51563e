"""Where results go: one text to stdout as it is verified, or a record for every prompt."""

from __future__ import annotations

import io
import json
import os
import stat
import sys
from collections.abc import Callable
from typing import IO, Any

from edgespec.cli.console import Console, print_error, visible
from edgespec.cli.prompts import PromptRow
from edgespec.cli.records import RunSettings, error_record, run_fields, success_record
from edgespec.engine import Engine
from edgespec.errors import EXIT_SOME_FAILED, EdgespecError
from edgespec.results import GenerationResult, TextChunk


def stream_one(console: Console, engine: Engine, ids: list[int], settings: RunSettings) -> int:
    """Text to stdout as it is verified."""
    is_terminal = sys.stdout.isatty()
    num_tokens = 0

    def show(chunk: TextChunk) -> None:
        nonlocal num_tokens
        num_tokens += len(chunk.step.tokens)
        sys.stdout.write(visible(chunk.text) if is_terminal else chunk.text)
        sys.stdout.flush()

    try:
        result = _generate(engine, ids, settings, show)
    except KeyboardInterrupt:
        console.say(f"\nstopped: interrupted after {num_tokens} tokens")
        raise
    sys.stdout.write("\n")
    sys.stdout.flush()
    console.say(_summary([result]) + f" · stopped: {result.finish_reason} · seed {settings.seed}")
    return 0


def write_records(
    console: Console,
    engine: Engine,
    rows: list[PromptRow],
    encoded: list[list[int]],
    file: IO[str],
    settings: RunSettings,
    *,
    live_text: bool,
) -> int:
    """One record a prompt, on the disk before the next prompt starts; a failing prompt does not end the run."""
    run = run_fields(engine, settings)
    results: list[GenerationResult] = []
    num_failed = 0
    with console.progress_bar(wanted=not live_text) as bar:
        task = None if bar is None else bar.add_task("prompts", total=len(rows), note="")
        try:
            for index, (row, ids) in enumerate(zip(rows, encoded, strict=True)):
                place = f"[{index + 1}/{len(rows)}] id={row.id}"
                if live_text:
                    console.say(place)
                try:
                    result = _generate(engine, ids, settings, _follow(console, place, live_text=live_text))
                    results.append(result)
                    record = success_record(index, row, engine, result, run, settings)
                except EdgespecError as error:
                    num_failed += 1
                    record = error_record(index, row, error, run)
                    print_error(f"{row.where}: {error.what}", error.fix)
                _write_line(file, record)
                if live_text:
                    console.say("")
                if bar is not None and task is not None:
                    bar.update(task, completed=index + 1, note=_summary(results))
        except BaseException:
            console.say(f"stopped: {len(results) + num_failed} of {len(rows)} records are written")
            raise
    console.say(f"{len(rows)} prompts · {_summary(results)}" + (f" · {num_failed} failed" if num_failed else ""))
    return EXIT_SOME_FAILED if num_failed else 0


def _generate(
    engine: Engine, ids: list[int], settings: RunSettings, on_chunk: Callable[[TextChunk], None]
) -> GenerationResult:
    return engine.generate(
        ids,
        max_new_tokens=settings.max_new_tokens,
        sampling=settings.sampling,
        seed=settings.seed,
        on_chunk=on_chunk,
    )


def _follow(console: Console, place: str, *, live_text: bool) -> Callable[[TextChunk], None]:
    """What happens on every step of a text: show it, or now and then say that it goes on."""
    num_tokens = 0

    def follow(chunk: TextChunk) -> None:
        nonlocal num_tokens
        num_tokens += len(chunk.step.tokens)
        if live_text:
            sys.stderr.write(visible(chunk.text))
            sys.stderr.flush()
        else:
            console.say_sometimes(f"{place}: {num_tokens} tokens")

    return follow


def _write_line(file: IO[str], record: dict[str, Any]) -> None:
    try:
        file.write(json.dumps(record, ensure_ascii=False) + "\n")
        file.flush()
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # pipes and devices have nothing to sync
            os.fsync(file.fileno())
    except BrokenPipeError:
        raise
    except io.UnsupportedOperation:
        pass  # a stream in memory, with no file behind it
    except OSError as error:
        raise EdgespecError(
            "E_OUTPUT",
            f"cannot write results ({error.strerror}).",
            "Free some space; the records before this one are whole.",
        ) from error


def _summary(results: list[GenerationResult]) -> str:
    """Tokens, tokens/s, tokens a pass, passes: of all texts together."""
    num_tokens = sum(len(result.token_ids) for result in results)
    total_s = sum(result.total_s for result in results)
    passes = [step for result in results for step in result.passes]
    parts = [f"{num_tokens} tokens"]
    if total_s:
        parts.append(f"{num_tokens / total_s:.1f} tok/s")
    if passes:
        parts.append(f"{sum(len(step.tokens) for step in passes) / len(passes):.2f} tok/pass")
    return " · ".join([*parts, f"{len(passes)} passes"])
