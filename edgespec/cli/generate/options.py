"""Options of `edgespec generate` alone, each group handed on as one value."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from edgespec.cli.generate.formats import FORMATS
from edgespec.cli.generate.truncate import TRUNCATE
from edgespec.cli.options.distribution import LENGTH_SPELLINGS, check_stops, distribution_options, require_text
from edgespec.cli.options.group import Command, with_options
from edgespec.cli.options.numbers import WholeNumber, WholeRange
from edgespec.cli.options.prompts import input_flag, input_options
from edgespec.cli.prompts.read import read_text
from edgespec.cli.prompts.selection import RowSelection
from edgespec.config import DEFAULT_NEW_TOKENS, MAX_LOGPROBS, MAX_SEED
from edgespec.sampling.grammar import Grammar, json_schema_grammar

TRUNCATE_HELP = (
    "Prompts too long for the context: drop their beginning (left) or end (right), skip them with an error record, "
    "or fail before the run."
)
FORMAT_HELP = "Of the results. [default: jsonl; without -o text for prompts that are text, if one or on a terminal]"
OVERWRITE_HELP = "Replace an output file that holds results."
RESUME_HELP = "Go on with an output file: run what it lacks, and what failed."
FORCE_HELP = "With --resume: keep results of other settings or prompts."
ONLY_HELP = "Run the rows with these ids."
CATEGORY_HELP = "Run the rows of this category; repeatable."
REPEAT_HELP = "Run each row R times, with other draws each time; ids become ID#2, ID#3, ..."
DAY_HELP = "That the chat template tells, where it asks for one. [default: today; with --resume the first run's]"
ORDERED_HELP = "Write records in the file's order, as specbench and text always are. [default: as they are finished]"
SCHEMA_HELP = "Texts are JSON that fits this schema: a file, or the JSON itself."
GRAMMAR_HELP = "Texts match the grammar of this file, in Lark's form or in llama.cpp's GBNF."
LOGPROBS_HELP = "Records tell each token's log-probability and N likely ones, by the model alone; 0 to 20."
SPECIAL_HELP = "Of answers, as marks of channels and calls: keep them in texts, or drop them."
STDOUT = Path("-")
STOP_HELP = "End a text before this string, which is left out; repeatable."


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """Which prompts are to be run, and what goes around them."""

    source: str | None  # a file, or - for stdin
    text: str | None  # a prompt itself
    form: str  # of the source: one of `prompts.source.FORMS`
    selection: RowSelection
    system: str | None
    day: datetime.date | None  # None: today, or that of the results that are resumed
    raw: bool
    truncate: str  # left | right | skip | fail: what becomes of prompts that the context has no room for


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How texts are drawn where the rows do not say."""

    chosen: dict[str, Any]  # fields of `SamplingSettings` that were given
    max_new_tokens: int
    seed: int | None
    stop: tuple[str, ...]
    skip_special_tokens: bool  # of texts
    grammar: Grammar | None  # None: any text
    logprobs: int | None  # alternatives beside each token; None: none are told


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """Where results go, and in which form."""

    path: Path | None
    format_name: str | None
    overwrite: bool
    resume: bool
    force: bool
    fail_fast: bool
    live_text: bool
    ordered: bool
    dry_run: bool

    @property
    def shows_text(self) -> bool:
        """Return whether texts are shown while they are written, and so come one after the other."""
        return self.live_text or (self.format_name == "text" and self.path is None)


def prompt_options(function: Command) -> Command:
    """Add the options of sources, selection and system prompt, which are handed on as `asked`."""

    @functools.wraps(function)
    def call(
        *,
        prompts: str | None,
        prompts_file: str | None,
        prompt_text: str | None,
        input_form: str,
        start: int,
        limit: int | None,
        only: tuple[str, ...],
        category: tuple[str, ...],
        repeat: int,
        system: str | None,
        system_file: str | None,
        day: datetime.datetime | None,
        raw: bool,
        truncate: str,
        **others: Any,
    ) -> Any:
        given = [source for source in (prompts, prompts_file, prompt_text) if source is not None]
        if len(given) != 1:
            raise click.UsageError("Give one source of prompts: PROMPTS, -f FILE or -p TEXT.")
        if input_form != "auto" and prompt_text not in {None, "-"}:
            raise click.UsageError(f"{input_flag(input_form)} is for files; -p TEXT is one prompt.")
        if system is not None and system_file is not None:
            raise click.UsageError("Give one system prompt: --system or --system-file.")
        if system_file is not None:
            system = read_text(system_file, what="a text file").removesuffix("\n")
        for flag, text in (("-p", prompt_text), ("--system", system)):
            require_text(flag, text or "")
        is_text = prompt_text is not None and prompt_text != "-"
        ids = tuple(name.strip() for listed in only for name in listed.split(",") if name.strip())
        asked = PromptOptions(
            source=None if is_text else given[0],
            text=prompt_text if is_text else None,
            form=input_form,
            selection=RowSelection(only=ids, categories=category, start=start, limit=limit, repeat=repeat),
            system=system or None,
            day=None if day is None else day.date(),
            raw=raw,
            truncate=truncate,
        )
        return function(asked=asked, **others)

    options: list[Callable[[Command], Command]] = [
        click.argument("prompts", required=False),
        click.option("-f", "--file", "-i", "--input", "prompts_file", help="The same as PROMPTS."),
        click.option("-p", "--prompt", "prompt_text", metavar="TEXT", help="A prompt itself; - is stdin."),
        input_options,
        click.option("--start", type=WholeNumber(), default=0, metavar="N", help="Skip the first N rows."),
        click.option("--limit", type=WholeNumber(has_off=True), metavar="N", help="Run at most N rows."),
        click.option("--only", multiple=True, metavar="ID,...", help=ONLY_HELP),
        click.option("--category", multiple=True, metavar="NAME", help=CATEGORY_HELP),
        click.option("--repeat", type=WholeNumber(), default=1, metavar="R", help=REPEAT_HELP),
        click.option("--system", "--system-prompt", "-sys", help="System prompt of rows that have none."),
        click.option("--system-file", metavar="FILE", help="The same, from a file."),
        click.option("--day", type=click.DateTime(["%Y-%m-%d"]), metavar="YYYY-MM-DD", help=DAY_HELP),
        click.option(
            "--raw", "--ignore-chat-template", "raw", is_flag=True, help="Do not apply the model's chat template."
        ),
        click.option("--truncate", type=click.Choice(TRUNCATE), default="skip", show_default=True, help=TRUNCATE_HELP),
    ]
    return with_options(call, options)


def sampling_options(function: Command) -> Command:
    """Add the options of length, distribution, seed and stop strings, which are handed on as `wanted`."""

    @functools.wraps(function)
    def call(
        *,
        max_new_tokens: int,
        chosen: dict[str, Any],
        seed: int | None,
        stop: tuple[str, ...],
        special_tokens: str,
        json_schema: str | None,
        grammar: str | None,
        logprobs: int | None,
        **others: Any,
    ) -> Any:
        check_stops(stop)
        wanted = SamplingOptions(
            chosen=chosen, max_new_tokens=max_new_tokens, seed=seed, stop=stop,
            skip_special_tokens=special_tokens == "drop",
            grammar=_asked_grammar(json_schema, grammar), logprobs=logprobs,
        )  # fmt: skip
        return function(wanted=wanted, **others)

    below = [
        click.option("--seed", type=WholeRange(0, MAX_SEED, has_off=True),
                     help="Of every prompt's draws. [default: random, recorded]"),
        click.option("--stop", multiple=True, metavar="STR", help=STOP_HELP),
        click.option("--special-tokens", type=click.Choice(["keep", "drop"]), default="drop", show_default=True,
                     help=SPECIAL_HELP),
        click.option("--json-schema", "-j", metavar="FILE|JSON", help=SCHEMA_HELP),
        click.option("--grammar", metavar="FILE", help=GRAMMAR_HELP),
        click.option("--logprobs", type=WholeRange(0, MAX_LOGPROBS), metavar="N", help=LOGPROBS_HELP),
    ]  # fmt: skip
    length = click.option("-n", *LENGTH_SPELLINGS, "max_new_tokens", type=WholeNumber(),
                          default=DEFAULT_NEW_TOKENS, show_default=True,
                          help="Of each answer; -1: to the context's end.")  # fmt: skip
    return with_options(call, [length, distribution_options(has_greedy=True), *below])


def _asked_grammar(json_schema: str | None, grammar: str | None) -> Grammar | None:
    """Return the grammar that the command line names, read; raises EdgespecError."""
    if json_schema is not None and grammar is not None:
        raise click.UsageError("A text has one grammar: give --json-schema or --grammar.")
    if json_schema is not None:
        is_file = not json_schema.lstrip().startswith("{")
        return json_schema_grammar(read_text(json_schema, what="a file, or JSON") if is_file else json_schema)
    if grammar is not None:
        return Grammar(form="grammar", text=read_text(grammar, what="a file with a grammar"))
    return None


def output_options(function: Command) -> Command:
    """Add the options of the output file and its form, which are handed on as `out`."""

    @functools.wraps(function)
    def call(
        *,
        output: Path | None,
        format_name: str | None,
        overwrite: bool,
        resume: bool,
        force: bool,
        fail_fast: bool,
        live_text: bool,
        ordered: bool,
        dry_run: bool,
        **others: Any,
    ) -> Any:
        output = None if output == STDOUT else output
        if resume and overwrite:
            raise click.UsageError("--resume goes on with a file, --overwrite begins it anew: give one of them.")
        if (resume or overwrite) and output is None:
            raise click.UsageError(f"--{'resume' if resume else 'overwrite'} is about an output file: give -o FILE.")
        if force and not resume:
            raise click.UsageError("--force belongs to --resume.")
        if resume and format_name == "text":
            raise click.UsageError("--resume needs results with ids, which --format text does not write.")
        out = OutputOptions(
            path=output,
            format_name=format_name,
            overwrite=overwrite,
            resume=resume,
            force=force,
            fail_fast=fail_fast,
            live_text=live_text,
            ordered=ordered,
            dry_run=dry_run,
        )
        return function(out=out, **others)

    options = [
        click.option(
            "-o", "--output", type=click.Path(path_type=Path), help="Write results here, not to stdout; - is stdout."
        ),
        click.option("--format", "format_name", type=click.Choice(FORMATS), help=FORMAT_HELP),
        click.option("--resume", is_flag=True, help=RESUME_HELP),
        click.option("--overwrite", is_flag=True, help=OVERWRITE_HELP),
        click.option("--force", is_flag=True, help=FORCE_HELP),
        click.option("--fail-fast", is_flag=True, help="End the run at the first prompt that fails."),
        click.option("--stream", "live_text", is_flag=True, help="Show the text on stderr while records are written."),
        click.option("--ordered", is_flag=True, help=ORDERED_HELP),
        click.option("--dry-run", is_flag=True, help="Check everything, say what would be done, and load nothing."),
    ]
    return with_options(call, options)
