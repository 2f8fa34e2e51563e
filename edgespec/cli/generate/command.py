"""`edgespec generate`: complete the prompts of a file."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from edgespec.cli.console import Console, DrawLines
from edgespec.cli.ctrl_c import cancelling, import_engine, leaving_tidily, raise_interrupt, stopping_notice
from edgespec.cli.generate.options import GenerateOptions, OutputOptions
from edgespec.cli.generate.prepare import GenerateRun, Prompts, prepare, read_rows
from edgespec.cli.generate.progress import RunProgress, Tally
from edgespec.cli.generate.record_output import RecordOutput, open_output, take_output, write_records
from edgespec.cli.generate.records import RowRecord, run_fields
from edgespec.cli.open_engine import open_engine, open_prompt_cache, use_corpus, use_prompt_cache
from edgespec.cli.options.console import console_options
from edgespec.cli.options.record import options_of
from edgespec.cli.options.sections import FIRST, LAST, SectionedCommand
from edgespec.cli.prompts.read import holds_rows
from edgespec.cli.prompts.source import is_stdin_waiting
from edgespec.distributed.cluster import import_ray

if TYPE_CHECKING:
    from edgespec.engine import Engine

SECTIONS = {
    FIRST: (
        "prompt_text", "model", "draft_model", "path", "resume", "max_new_tokens", "temperature", "seed", "system",
        "max_gpu_mem",
    ),
    "Prompts": (
        "prompts_file", "lines", "input_format", "start", "limit", "only", "category", "repeat", "system_file", "day",
        "raw", "chat_template", "template_arg", "reasoning_budget", "reasoning_budget_message", "truncate",
    ),
    "Results": (
        "format_name", "special_tokens", "parsed", "logprobs", "echo_logprobs", "ordered", "overwrite", "force",
        "fail_fast", "live_text", "dry_run",
    ),
    "Many machines": ("address", "num_workers", "resources"),
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
presence_penalty, frequency_penalty, logit_bias, ignore_eos, response_format, logprobs, seed, stop, tools,
tool_choice, which count more than flags. A row may also be TEXT or [ID, TEXT]. Without a chat template a
conversation is one text: a message begins on a line of its own, an answer goes on where its question ends.

\b
Exit codes: 0 done, 1 failed while running, 2 wrong usage or input, 3 done but some prompts failed,
4 model or file not found, 5 does not fit the memory, 130 interrupted, 143 terminated.
""",
)
@options_of(GenerateOptions, handed_on_as="options")
@console_options(has_verbose=True)
def command(*, options: GenerateOptions, console: Console) -> int:
    """Complete PROMPTS: a text file (one prompt), JSONL, JSON array, or - (stdin).

    A text, and no -o: it streams to stdout. Otherwise, and for JSON rows, one JSON record a prompt.
    """
    has_workers = options.workers.address is not None
    if has_workers:
        import_ray()  # which may not be installed
    with ExitStack() as stack:
        prompts, options = _read_prompts(console, options, stack)
        import_engine(console, tidy=stack.close)
        if has_workers:
            from edgespec.cli.generate.over_workers import run_on_workers

            return run_on_workers(console, prompts, options)
        pair_options, machine = options.pair_options, options.pair_options.machine
        with console.status("reading headers and prompts"):
            run = prepare(console, prompts, options)
        if options.output.dry_run:
            from edgespec.cli.generate.dry_run import say_work

            say_work(console, run, machine)
            return 0
        setup, path = run.setup, pair_options.prompt_cache if run.requests else None
        cache = open_prompt_cache(path, setup.pair, setup.run_config)
        output = open_output(prompts, run.requests, options.output, stack)
        if not run.requests:
            console.say("nothing to do")
            return 0
        with leaving_tidily():
            engine = open_engine(
                console,
                setup,
                machine,
                self_check=pair_options.self_check,
                draft_check=pair_options.draft_check == "auto",
            )
        stack.callback(engine.close)
        use_corpus(console, engine, pair_options.corpus)
        use_prompt_cache(console, engine, cache, [request.ids for request in run.requests if request.fault is None])
        return _run(console, run, engine, output, options.output)


def _read_prompts(console: Console, options: GenerateOptions, stack: ExitStack) -> tuple[Prompts, GenerateOptions]:
    """Read the rows, choose the results' format, take the output file and read what it has of them.

    Returns the options with that format; raises EdgespecError.
    """
    output = options.output
    if options.prompts.text is not None and is_stdin_waiting():
        console.say("stdin is not read beside -p TEXT: `edgespec chat -p TEXT` makes one message of both")
    format_name = output.format_name or ("jsonl" if output.path else "")
    adapters = [one.name for one in options.pair_options.models.adapters]
    rows, selected = read_rows(console, options.prompts, format_name, adapters)
    if not format_name:
        is_seen = sys.stdout.isatty()
        is_record = options.sampling.echo_logprobs or holds_rows(selected) or (len(selected) > 1 and not is_seen)
        format_name = "jsonl" if is_record else "text"
        if format_name == "jsonl" and is_seen and not output.dry_run:
            console.say("JSON rows give JSON records: -o FILE keeps them, --format text shows the texts alone")
    output = replace(output, format_name=format_name)
    file, results = take_output(output, len(selected), stack)
    return Prompts(all=rows, selected=selected, results=results, file=file), replace(options, output=output)


def _run(console: Console, run: GenerateRun, engine: Engine, output: RecordOutput, options: OutputOptions) -> int:
    """Run all requests, write their results, and return the exit status."""
    from edgespec.cli.generate.batched import Run, together
    from edgespec.cli.generate.shown import one_by_one, stream_one

    requests = run.requests
    draws = console.is_terminal and not options.shows_text
    notices = () if console.quiet else (stopping_notice(line_width=console.width if draws else None),)
    with cancelling(engine, notices=notices, give_up=raise_interrupt) as num_pressed:
        running = Run(
            console=console,
            engine=engine,
            predicted_per_s=run.setup.predicted_per_s,
            fields=run_fields(engine.pair, engine.run_config, run.config),
            encode=run.work.encode,
            num_pressed=num_pressed,
        )
        output.begin()
        if output.streams and len(requests) == 1:
            return stream_one(running, requests[0])
        is_live = output.streams or (options.live_text and not console.quiet)
        tally = Tally(requests)

        def answer(draw: DrawLines) -> Generator[RowRecord, None, None]:
            if is_live:
                return one_by_one(running, requests, to_stdout=output.streams)
            return together(running, requests, RunProgress(console, tally, draw))

        return write_records(
            console,
            answer,
            tally,
            output,
            seed=run.work.settings.seed,
            shows_progress=not is_live,
            fail_fast=options.fail_fast,
        )
