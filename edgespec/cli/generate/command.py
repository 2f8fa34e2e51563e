"""`edgespec generate`: complete the prompts of a file."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgespec.cli.console import Console, DrawLines
from edgespec.cli.ctrl_c import cancelling, import_engine, leaving_tidily, raise_interrupt, stopping_notice
from edgespec.cli.generate.in_order import InOrder
from edgespec.cli.generate.open_output import begin_output, open_output, take_output
from edgespec.cli.generate.options import (
    OutputOptions,
    PromptOptions,
    SamplingOptions,
    output_options,
    prompt_options,
    sampling_options,
)
from edgespec.cli.generate.prepare import GenerateOptions, PairOptions, Prepared, Prompts, prepare, read_rows
from edgespec.cli.generate.ray_options import WorkerOptions, check_options, ray_options
from edgespec.cli.generate.sinks import Sink
from edgespec.cli.open_engine import open_engine
from edgespec.cli.options.console import console_options
from edgespec.cli.options.machine import MachineOptions, machine_options, parallel_option
from edgespec.cli.options.model import ModelOptions, model_options
from edgespec.cli.options.sections import FIRST, LAST, SectionedCommand
from edgespec.cli.options.template import template_options
from edgespec.cli.options.tree import TreeOptions, tree_options
from edgespec.cli.prompt_cache import open_prompt_cache, prompt_cache_option, use_prompt_cache
from edgespec.cli.prompts.read import holds_rows
from edgespec.distributed.cluster import import_ray

if TYPE_CHECKING:
    from edgespec.cli.generate.output import Answered
    from edgespec.engine import Engine

SECTIONS = {
    FIRST: (
        "prompt_text", "model", "draft_model", "output", "resume", "max_new_tokens", "temperature", "seed", "system",
        "max_gpu_mem",
    ),
    "Prompts": (
        "prompts_file", "lines", "input_format", "start", "limit", "only", "category", "repeat", "system_file", "day",
        "raw", "chat_template", "template_arg", "truncate",
    ),
    "Results": (
        "format_name", "special_tokens", "logprobs", "ordered", "overwrite", "force", "fail_fast", "live_text",
        "dry_run",
    ),
    "Many machines": ("ray", "num_workers", "resources"),
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
@template_options
@output_options
@sampling_options
@tree_options(has_profile=True)
@machine_options
@parallel_option
@prompt_cache_option
@ray_options
@click.option("--no-self-check", is_flag=True, help="Do not try whether the model's family reads token trees rightly.")
@console_options(has_verbose=True)
def command(
    *,
    asked: PromptOptions,
    models: ModelOptions,
    out: OutputOptions,
    wanted: SamplingOptions,
    trees: TreeOptions,
    machine: MachineOptions,
    parallel: int | None,
    prompt_cache: Path | None,
    no_self_check: bool,
    workers: WorkerOptions | None,
    console: Console,
) -> int:
    """Complete PROMPTS: a text file (one prompt), JSONL, JSON array, or - (stdin).

    A text, and no -o: it streams to stdout. Otherwise, and for JSON rows, one JSON record a prompt.
    """
    if workers is not None:
        check_options(out, prompt_cache)
        import_ray()  # which may not be installed
    with ExitStack() as stack:
        prompts, format_name = _prompts(console, asked, out, stack)
        out = replace(out, format_name=format_name)
        import_engine(console, tidy=stack.close)
        pair_options = PairOptions(models=models, trees=trees, machine=machine, parallel=parallel)
        run = GenerateOptions(prompts=asked, out=out, wanted=wanted, pair_options=pair_options)
        if workers is not None:
            from edgespec.cli.generate.over_workers import run_on_workers

            return run_on_workers(console, prompts, run, workers, format_name=format_name, self_check=not no_self_check)
        with console.status("reading headers and prompts"):
            prepared = prepare(console, prompts, run)
        if out.dry_run:
            from edgespec.cli.generate.dry_run import say_work

            say_work(console, prepared, machine)
            return 0
        cache = open_prompt_cache(prompt_cache, prepared.pair, prepared.setup.run_config) if prepared.requests else None
        output = open_output(prompts, prepared.requests, out, format_name, stack)
        if not prepared.requests:
            console.say("nothing to do")
            return 0
        with leaving_tidily():
            engine = open_engine(console, prepared.setup, machine, self_check=not no_self_check)
        stack.callback(engine.close)
        use_prompt_cache(
            console, engine, cache, [request.ids for request in prepared.requests if request.fault is None]
        )
        return _run(console, prepared, engine, output, out, format_name)


def _prompts(console: Console, asked: PromptOptions, out: OutputOptions, stack: ExitStack) -> tuple[Prompts, str]:
    """Read the rows, take the output file and what it has of them, and choose the results' format.

    Raises EdgespecError.
    """
    format_name = out.format_name or ("jsonl" if out.path else "")
    rows, wanted = read_rows(console, asked, format_name)
    if not format_name:
        is_seen = sys.stdout.isatty()
        format_name = "jsonl" if holds_rows(wanted) or (len(wanted) > 1 and not is_seen) else "text"
        if format_name == "jsonl" and is_seen and not out.dry_run:
            console.say("JSON rows give JSON records: -o FILE keeps them, --format text shows the texts alone")
    file, results = take_output(out, format_name, len(wanted), stack)
    return Prompts(all=rows, wanted=wanted, results=results, file=file), format_name


def _run(
    console: Console,
    prepared: Prepared,
    engine: Engine,
    output: tuple[Sink, InOrder | None],
    out: OutputOptions,
    format_name: str,
) -> int:
    """Run all requests, write their results to the sink, and return the exit status."""
    from edgespec.cli.generate.batched import Run, together
    from edgespec.cli.generate.output import Written, one_by_one, stream_one, with_records, write_records
    from edgespec.cli.generate.progress import RunProgress
    from edgespec.cli.generate.records import run_fields
    from edgespec.cli.generate.tally import Tally

    sink, in_order = output
    requests = prepared.requests
    draws = console.is_terminal and not out.shows_text
    notices = () if console.quiet else (stopping_notice(line_width=console.width if draws else None),)
    with cancelling(engine, notices=notices, give_up=raise_interrupt) as num_pressed:
        run = Run(
            console=console,
            engine=engine,
            settings=prepared.settings,
            fields=run_fields(engine.pair, engine.run_config, prepared.config),
            encode=prepared.encode,
            num_pressed=num_pressed,
        )
        begin_output(output, out)
        is_shown = out.path is None and format_name == "text"
        if is_shown and len(requests) == 1:
            return stream_one(run, requests[0])
        is_live = is_shown or (out.live_text and not console.quiet)
        tally = Tally(requests, max_context=engine.max_context)

        def answer(draw: DrawLines) -> Generator[Answered, None, None]:
            if is_live:
                return with_records(run, one_by_one(run, requests, to_stdout=is_shown))
            return with_records(run, together(run, requests, RunProgress(console, tally, draw)))

        written = Written(
            sink=sink,
            in_order=in_order,
            format_name=format_name,
            to_stdout=out.path is None,
            seed=prepared.settings.seed,
        )
        return write_records(console, answer, tally, written, shows_progress=not is_live, fail_fast=out.fail_fast)
