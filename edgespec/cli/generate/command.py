"""`edgespec generate`: complete the prompts of a file."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgespec.cli.console import Console
from edgespec.cli.ctrl_c import STOPPING, cancelling, leaving_at_once, leaving_tidily
from edgespec.cli.generate.options import (
    AskedOutput,
    AskedPrompts,
    AskedSampling,
    output_options,
    prompt_options,
    sampling_options,
)
from edgespec.cli.generate.prepare import AskedRun, Prepared, Prompts, prepare, read_rows
from edgespec.cli.generate.resume import Results, keep_finished, read_results
from edgespec.cli.generate.sinks import OutputFile, Sink, StandardOutput
from edgespec.cli.open_engine import open_engine
from edgespec.cli.options.console import console_options
from edgespec.cli.options.machine import MachineOptions, machine_options, parallel_option
from edgespec.cli.options.model import AskedModels, model_options
from edgespec.cli.options.tree import AskedTrees, tree_options
from edgespec.cli.prompt_cache import open_prompt_cache, prompt_cache_option, use_prompt_cache
from edgespec.errors import EdgespecError

if TYPE_CHECKING:
    from edgespec.engine import Engine


@click.command(
    name="generate",
    epilog="""\b
Examples:
  edgespec generate prompts.jsonl -o out.jsonl            the built-in pair
  edgespec generate prompts.jsonl -o out.jsonl --resume   go on after an interruption
  edgespec generate prompt.txt -m TARGET -md DRAFT        one prompt, streamed to stdout
  edgespec generate -p 'def main(' --temp 0.8 --seed 7 --stop $'\\n\\n'
  edgespec generate question.jsonl --category math --format specbench -o answers.jsonl

\b
Rows of .jsonl and .json files have one of
  "prompt": TEXT    "messages": [{"role": "user", "content": TEXT}, ...]
  "turns": [TEXT, ...], each answered in turn    "body": an OpenAI batch request
and perhaps id, category, system, max_new_tokens, temperature, top_p, top_k, min_p, seed, stop, which count
more than flags. A row may also be TEXT or [ID, TEXT]. Without a chat template a conversation is one
text: a message begins on a line of its own, an answer goes on where its question ends.

\b
Exit codes: 0 done, 1 failed while running, 2 wrong usage or input, 3 done but some prompts failed,
4 model or file not found, 5 does not fit the memory, 130 interrupted, 143 terminated.
""",
)
@prompt_options
@model_options
@output_options
@sampling_options
@tree_options(has_profile=True)
@machine_options
@parallel_option
@prompt_cache_option
@click.option("--no-self-check", is_flag=True, help="Do not try whether the model's family reads token trees rightly.")
@console_options(has_verbose=True)
def command(
    *,
    asked: AskedPrompts,
    models: AskedModels,
    out: AskedOutput,
    wanted: AskedSampling,
    trees: AskedTrees,
    machine: MachineOptions,
    parallel: int | None,
    prompt_cache: Path | None,
    no_self_check: bool,
    console: Console,
) -> int:
    """Complete PROMPTS: a text file (one prompt), JSONL rows or a JSON array, or - for stdin.

    One prompt and no -o: the text streams to stdout. Otherwise one JSON record a prompt, written as it
    finishes. Everything else goes to stderr.
    """
    prompts, format_name = _prompts(console, asked, out)
    out = replace(out, format_name=format_name)
    with leaving_at_once():  # torch and transformers are imported from here on
        import edgespec.engine  # noqa: F401
    run = AskedRun(prompts=asked, out=out, wanted=wanted, models=models, trees=trees, machine=machine,
                   parallel=parallel)  # fmt: skip
    prepared = prepare(console, prompts, run)
    if out.dry_run:
        from edgespec.cli.generate.dry_run import say_work

        say_work(console, prepared, machine)
        return 0
    if not prepared.requests:
        console.say("nothing to do")
        return 0
    cache = open_prompt_cache(prompt_cache, prepared.pair, prepared.setup.place)
    with ExitStack() as stack:
        sink: Sink = StandardOutput()
        if out.path is not None:
            if prompts.results is not None:
                OutputFile(out.path).close()  # refused where another run is at it
                keep_finished(prompts.results, {request.row.id for request in prepared.requests})
            sink = OutputFile(out.path, overwrite=out.overwrite)
            stack.callback(sink.close)
        with leaving_tidily():
            engine = open_engine(console, prepared.setup, machine, self_check=not no_self_check)
        stack.callback(engine.close)
        use_prompt_cache(console, engine, cache, [request.ids for request in prepared.requests])
        return _run(console, prepared, engine, sink, out, format_name)


def _prompts(console: Console, asked: AskedPrompts, out: AskedOutput) -> tuple[Prompts, str]:
    """Read the rows and what the output file has of them, and choose the results' format; raises EdgespecError."""
    format_name = out.format_name or ("jsonl" if out.path else "")
    rows, wanted = read_rows(console, asked, format_name)
    if not format_name:
        format_name = "text" if len(wanted) == 1 or sys.stdout.isatty() else "jsonl"
    results = None
    if out.path is not None:
        _check_output(out, asked.source)
        if out.resume:
            results = read_results(out.path, format_name)
        elif not out.overwrite:
            _refuse_results(out.path, format_name, len(wanted))
    return Prompts(all=rows, wanted=wanted, results=results), format_name


def _run(console: Console, prepared: Prepared, engine: Engine, sink: Sink, out: AskedOutput, format_name: str) -> int:
    """Run all requests, write their results to the sink, and return the exit status."""
    from edgespec.cli.generate.output import stream_one, write_records
    from edgespec.cli.generate.records import run_fields
    from edgespec.cli.generate.together import Run

    to_stdout = out.path is None
    requests = prepared.requests
    notices = () if console.quiet else (STOPPING,)
    with cancelling(engine, notices=notices, give_up=_raise_interrupt) as num_pressed:
        run = Run(
            console=console,
            engine=engine,
            settings=prepared.settings,
            fields=run_fields(engine, prepared.config),
            encode=prepared.encode,
            num_pressed=num_pressed,
        )
        sink.begin()
        if to_stdout and format_name == "text" and len(requests) == 1:
            return stream_one(run, requests[0])
        is_shown = to_stdout and format_name == "text"
        return write_records(
            run,
            requests,
            sink,
            format_name=format_name,
            to_stdout=to_stdout,
            live_text=out.live_text and not console.quiet and not is_shown,
            fail_fast=out.fail_fast,
            ordered=out.ordered,
        )


def _raise_interrupt() -> None:
    raise KeyboardInterrupt


def _check_output(out: AskedOutput, source: str | None) -> None:
    """Raise EdgespecError where the output file would replace the prompts, or cannot be written."""
    path = out.path
    assert path is not None
    if path.is_dir():
        raise EdgespecError("E_OUTPUT", f"'{path}' is a folder.", "Name a file in it.")
    if source not in {None, "-"} and path.resolve() == Path(str(source)).resolve():
        raise EdgespecError("E_OUTPUT", f"'{path}' is the prompt file.", "Choose another file for the results.")
    if not path.parent.is_dir():
        raise EdgespecError("E_OUTPUT", f"there is no folder '{path.parent}' to write in.", "Make it first.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise EdgespecError("E_OUTPUT", f"'{path}' cannot be written.", "Choose a file that can be.")
    if out.resume and path.exists() and not path.is_file():
        raise EdgespecError("E_OUTPUT", f"'{path}' is no file to go on with.", "Leave out --resume.")


def _refuse_results(path: Path, format_name: str, num_wanted: int) -> None:
    """Raise EdgespecError for an output file that is not empty."""
    if not path.is_file() or not path.stat().st_size:
        return
    try:
        found: Results | None = read_results(path, format_name)
    except EdgespecError:
        found = None  # something else's file
    if found is None or not found.entries:
        raise EdgespecError(
            "E_OUTPUT_EXISTS", f"'{path}' exists and is not empty.", "Choose another file, or give --overwrite."
        )
    raise EdgespecError(
        "E_OUTPUT_EXISTS",
        f"'{path}' has {len(found.done)} of {num_wanted} results.",
        "Give --resume to go on with it, or --overwrite.",
    )
