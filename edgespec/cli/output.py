"""Where results go: one text to stdout as it is verified, or a record for every prompt."""

from __future__ import annotations

import json
import os
import sys
from typing import IO, Any

from edgespec.cli.console import Console, visible
from edgespec.cli.prompts import PromptRow
from edgespec.cli.records import error_record, run_fields, success_record
from edgespec.config import SamplingSettings
from edgespec.engine import Engine
from edgespec.errors import EXIT_RUNTIME, EXIT_SOME_FAILED, EdgespecError
from edgespec.results import GenerationResult, TextChunk


def stream_one(
    console: Console, engine: Engine, ids: list[int], sampling: SamplingSettings, max_new_tokens: int, seed: int
) -> int:
    """Text to stdout as it is verified."""
    is_terminal = sys.stdout.isatty()

    def show(chunk: TextChunk) -> None:
        sys.stdout.write(visible(chunk.text) if is_terminal else chunk.text)
        sys.stdout.flush()

    result = engine.generate(ids, max_new_tokens=max_new_tokens, sampling=sampling, seed=seed, on_chunk=show)
    sys.stdout.write("\n")
    sys.stdout.flush()
    console.say(_summary([result]) + f" · stopped: {result.finish_reason} · seed {seed}")
    return 0


def write_records(
    console: Console,
    engine: Engine,
    rows: list[PromptRow],
    encoded: list[list[int]],
    file: IO[str],
    *,
    sampling: SamplingSettings,
    max_new_tokens: int,
    seed: int,
    live_text: bool,
) -> int:
    """One record a prompt, on the disk before the next prompt starts; a failing prompt does not end the run."""
    run = run_fields(engine, sampling, max_new_tokens=max_new_tokens, seed=seed)
    results: list[GenerationResult] = []
    num_failed = 0

    def show(chunk: TextChunk) -> None:
        sys.stderr.write(visible(chunk.text))
        sys.stderr.flush()

    with console.progress_bar(wanted=not live_text) as bar:
        task = None if bar is None else bar.add_task("prompts", total=len(rows), note="")
        try:
            for index, (row, ids) in enumerate(zip(rows, encoded, strict=True)):
                if live_text:
                    console.say(f"[{index + 1}/{len(rows)}] id={row.id}")
                try:
                    result = engine.generate(
                        ids,
                        max_new_tokens=max_new_tokens,
                        sampling=sampling,
                        seed=seed,
                        on_chunk=show if live_text else None,
                    )
                    results.append(result)
                    record = success_record(index, row, engine, result, run)
                except EdgespecError as error:
                    num_failed += 1
                    record = error_record(index, row, error, run)
                    console.say(f"{row.where}: {error.what}")
                _write_line(file, record)
                if live_text:
                    console.say("")
                if bar is not None and task is not None:
                    bar.update(task, completed=index + 1, note=_summary(results))
                console.say_sometimes(f"{index + 1}/{len(rows)} prompts · {_summary(results)}")
        except BaseException:
            console.say(f"stopped: {len(results) + num_failed} of {len(rows)} records are written")
            raise
    console.say(f"{len(rows)} prompts · {_summary(results)}" + (f" · {num_failed} failed" if num_failed else ""))
    if num_failed == len(rows):
        return EXIT_RUNTIME
    return EXIT_SOME_FAILED if num_failed else 0


def _write_line(file: IO[str], record: dict[str, Any]) -> None:
    try:
        file.write(json.dumps(record, ensure_ascii=False) + "\n")
        file.flush()
        if file is not sys.stdout:
            os.fsync(file.fileno())
    except BrokenPipeError:
        raise
    except OSError as error:
        raise EdgespecError(
            "E_OUTPUT",
            f"cannot write results ({error.strerror}).",
            "Free some space; what was written before is whole.",
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
