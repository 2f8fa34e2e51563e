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
from edgespec.cli.ctrl_c import cancelling, import_engine, leaving_tidily, stopping_notice
from edgespec.cli.generate.in_order import InOrder
from edgespec.cli.generate.options import (
    AskedOutput,
    AskedPrompts,
    AskedSampling,
    output_options,
    prompt_options,
    sampling_options,
)
from edgespec.cli.generate.prepare import AskedRun, Prepared, Prompts, prepare, read_rows
from edgespec.cli.generate.resume import Results, keep_finished, read_results, waiting_path
from edgespec.cli.generate.sinks import OutputFile, Sink, StandardOutput
from edgespec.cli.log_file import current_log
from edgespec.cli.open_engine import open_engine
from edgespec.cli.options.console import console_options
from edgespec.cli.options.machine import MachineOptions, machine_options, parallel_option
from edgespec.cli.options.model import AskedModels, model_options
from edgespec.cli.options.sections import FIRST, LAST, SectionedCommand
from edgespec.cli.options.tree import AskedTrees, tree_options
from edgespec.cli.prompt_cache import open_prompt_cache, prompt_cache_option, use_prompt_cache
from edgespec.cli.prompts.read import holds_rows
from edgespec.errors import EdgespecError

if TYPE_CHECKING:
    from edgespec.engine import Engine

IN_ORDER = ("text", "specbench")  # formats whose readers go by a result's place
SECTIONS = {
    FIRST: (
        "prompt_text", "model", "draft_model", "output", "resume", "max_new_tokens", "temperature", "seed", "system",
        "max_gpu_mem",
    ),
    "Prompts": (
        "prompts_file", "lines", "start", "limit", "only", "category", "repeat", "system_file", "raw", "truncate",
    ),
    "Results": ("format_name", "logprobs", "ordered", "overwrite", "force", "fail_fast", "live_text", "dry_run"),
    **LAST,
}  # fmt: skip


@click.command(
    name="generate",
    short_help="Complete prompts: of a file, a pipe, or -p TEXT.",
    cls=SectionedCommand,
    sections=SECTIONS,
    examples="""\
edgespec generate -p 'def main(' --temp 0.8              with the built-in pair
edgespec generate prompts.jsonl -m TARGET -md DRAFT -o out.jsonl
edgespec generate prompts.jsonl -o out.jsonl --resume    what is left to do
""",
    epilog="""\b
More examples:
  edgespec generate prompt.txt -m TARGET -md DRAFT        a file that is one prompt
  edgespec generate -p 'def main(' --temp 0.8 --seed 7 --stop $'\\n\\n'
  edgespec generate question.jsonl --category math --format specbench -o answers.jsonl

\b
Rows of .jsonl and .json files have one of
  "prompt": TEXT    "messages": [{"role": "user", "content": TEXT}, ...]
  "turns": [TEXT, ...], each answered in turn    "body": an OpenAI batch request
and perhaps id, category, system, max_new_tokens, temperature, top_p, top_k, min_p, repetition_penalty,
presence_penalty, frequency_penalty, logit_bias, ignore_eos, response_format, logprobs, seed, stop, which count
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
    """Complete PROMPTS: a text file (one prompt), JSONL, JSON array, or - (stdin).

    A text, and no -o: it streams to stdout. Otherwise, and for JSON rows, one JSON record a prompt.
    """
    prompts, format_name = _prompts(console, asked, out)
    out = replace(out, format_name=format_name)
    import_engine(console)
    run = AskedRun(prompts=asked, out=out, wanted=wanted, models=models, trees=trees, machine=machine,
                   parallel=parallel)  # fmt: skip
    with console.status("reading headers and prompts"):
        prepared = prepare(console, prompts, run)
    if out.dry_run:
        from edgespec.cli.generate.dry_run import say_work

        say_work(console, prepared, machine)
        return 0
    cache = open_prompt_cache(prompt_cache, prepared.pair, prepared.setup.place) if prepared.requests else None
    with ExitStack() as stack:
        output = _open_output(prompts, prepared, out, format_name, stack)
        if not prepared.requests:
            console.say("nothing to do")
            return 0
        with leaving_tidily():
            engine = open_engine(console, prepared.setup, machine, self_check=not no_self_check)
        stack.callback(engine.close)
        use_prompt_cache(console, engine, cache, [request.ids for request in prepared.requests])
        return _run(console, prepared, engine, output, out, format_name)


def _prompts(console: Console, asked: AskedPrompts, out: AskedOutput) -> tuple[Prompts, str]:
    """Read the rows and what the output file has of them, and choose the results' format; raises EdgespecError."""
    format_name = out.format_name or ("jsonl" if out.path else "")
    rows, wanted = read_rows(console, asked, format_name)
    if not format_name:
        is_seen = sys.stdout.isatty()
        format_name = "jsonl" if holds_rows(asked.source) or (len(wanted) > 1 and not is_seen) else "text"
        if format_name == "jsonl" and is_seen and not out.dry_run:
            console.say("JSON rows give JSON records: -o FILE keeps them, --format text shows the texts alone")
    results = None
    if out.path is not None:
        _check_output(out, asked.source)
        if out.resume:
            results = read_results(out.path, format_name)
        elif not out.overwrite:
            _refuse_results(out.path, format_name, len(wanted))
    return Prompts(all=rows, wanted=wanted, results=results), format_name


def _open_output(
    prompts: Prompts, prepared: Prepared, out: AskedOutput, format_name: str, stack: ExitStack
) -> tuple[Sink, InOrder | None]:
    """Open what records go to, the order in which they do, and what of it is there already; raises EdgespecError."""
    to_run = [request.row.id for request in prepared.requests]
    is_ordered = out.ordered or format_name in IN_ORDER
    if out.path is None:
        stdout = StandardOutput()
        return stdout, InOrder(stdout, None, to_run) if is_ordered else None
    order = [row.id for row in prompts.all]
    held: dict[str, str] = {}
    if prompts.results is not None:
        OutputFile(out.path).close()  # refused where another run is at it
        held = keep_finished(prompts.results, set(to_run), order if is_ordered else None)
    sink = OutputFile(out.path, overwrite=out.overwrite)
    stack.callback(sink.close)
    if not is_ordered:
        return sink, None
    waiting = None
    if format_name != "text" and out.path.is_file():  # texts without ids are not gone on with
        waiting = OutputFile(waiting_path(out.path), overwrite=prompts.results is None)
        stack.callback(waiting.close)
    coming = {*to_run, *held}
    return sink, InOrder(sink, waiting, [name for name in order if name in coming], held)


def _run(
    console: Console,
    prepared: Prepared,
    engine: Engine,
    output: tuple[Sink, InOrder | None],
    out: AskedOutput,
    format_name: str,
) -> int:
    """Run all requests, write their results to the sink, and return the exit status."""
    from edgespec.cli.generate.output import stream_one, write_records
    from edgespec.cli.generate.records import run_fields
    from edgespec.cli.generate.together import Run

    sink, in_order = output
    to_stdout = out.path is None
    requests = prepared.requests
    draws = console.is_terminal and not out.shows_text
    notices = () if console.quiet else (stopping_notice(line_width=console.width if draws else None),)
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
        if in_order is not None:
            in_order.begin()
        elif out.overwrite and out.path is not None:
            waiting_path(out.path).unlink(missing_ok=True)
        if to_stdout and format_name == "text" and len(requests) == 1:
            return stream_one(run, requests[0])
        is_shown = to_stdout and format_name == "text"
        return write_records(
            run,
            requests,
            sink,
            in_order=in_order,
            format_name=format_name,
            to_stdout=to_stdout,
            live_text=out.live_text and not console.quiet and not is_shown,
            fail_fast=out.fail_fast,
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
    if (log := current_log()) is not None and path.resolve() == log.resolve():
        raise EdgespecError("E_OUTPUT", f"'{path}' is the log.", "Choose another file for the results.")
    if not path.parent.is_dir():
        raise EdgespecError("E_OUTPUT", f"there is no folder '{path.parent}' to write in.", "Make it first.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise EdgespecError("E_OUTPUT", f"'{path}' cannot be written.", "Choose a file that can be.")
    if out.resume and path.exists() and not path.is_file():
        raise EdgespecError("E_OUTPUT", f"'{path}' is no file to go on with.", "Leave out --resume.")


def _refuse_results(path: Path, format_name: str, num_wanted: int) -> None:
    """Raise EdgespecError for an output file that is not empty, or records that wait for some before them."""
    if not any(file.is_file() and file.stat().st_size for file in (path, waiting_path(path))):
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
