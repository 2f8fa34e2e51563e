"""Options of `edgespec generate`."""

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import click

from edgespec.cli.generate.formats import FORMATS
from edgespec.cli.generate.truncate import TRUNCATE
from edgespec.cli.options.distribution import (
    LENGTH_SPELLINGS,
    RAW_HELP,
    SYSTEM_FILE_HELP,
    SYSTEM_HELP,
    DrawingOptions,
    read_system,
    require_text,
)
from edgespec.cli.options.engine import EngineOptions
from edgespec.cli.options.machine import PARALLEL_HELP
from edgespec.cli.options.numbers import NumberOrAuto, WholeNumber, WholeRange
from edgespec.cli.options.prompts import InputOptions
from edgespec.cli.options.record import argument, group, option, settle
from edgespec.cli.prompts.read import read_text
from edgespec.cli.prompts.selection import RowSelection
from edgespec.config import DEFAULT_NEW_TOKENS, MAX_LOGPROBS, check_num_texts
from edgespec.sampling.grammar import Grammar, compact_json, json_schema_grammar

TRUNCATE_HELP = (
    "Choose what becomes of prompts too long for the context: drop their beginning (left) or end (right), skip them "
    "with an error record, or fail before the run."
)
IMAGE_HELP = "Show this picture with -p, before its text; repeatable."
FORMAT_HELP = (
    "Write results in this format. [default: jsonl; without -o text for prompts that are text, if one or on a terminal]"
)
OVERWRITE_HELP = "Replace an output file that holds results."
RESUME_HELP = "Continue an output file: run what it lacks, and what failed."
FORCE_HELP = "Keep results of other settings or prompts, with --resume."
ONLY_HELP = "Run the rows with these ids."
CATEGORY_HELP = "Run the rows of this category; repeatable."
REPEAT_HELP = "Run each row R times, with other draws each time; ids become ID#2, ID#3, ..."
DAY_HELP = "Tell the chat template this day, where it asks for one. [default: today; with --resume the first run's]"
ORDERED_HELP = "Write records in the file's order, as specbench and text always are. [default: as they are finished]"
SCHEMA_HELP = "Make texts JSON that fits this schema: a file, or the JSON itself."
COMPACT_HELP = "Leave out the white space between the parts of --json-schema's JSON; this changes texts."
PARSED_HELP = "Record beside a text what its JSON stands for, as `parsed`; null where a bound has cut it."
GRAMMAR_HELP = "Make texts match the grammar of this file, in Lark's form or in llama.cpp's GBNF."
LOGPROBS_HELP = "Record each token's log-probability and N likely ones, by the model alone; 0 to 20."
SPECIAL_HELP = "Keep the special tokens of answers in texts, as marks of channels and calls, or drop them."
ECHO_HELP = (
    "Record the log-probability of each of the prompt's tokens too, with --logprobs' likely ones; -n 0: no more."
)
LENGTH_HELP = "Limit each answer to this many tokens; -1: to the context's end."
RAY_HELP = (
    "Spread the rows over a Ray cluster: HOST:PORT, auto (the one this machine belongs to, as without a value), or "
    "local (this machine alone)."
)
WORKERS_HELP = "Start this many workers, each with a pair of its own. [default: one a GPU, or one a machine]"
RESOURCES_HELP = "Give each worker this of its machine. [default: gpu=1 where there are any, else cpu=1]"
STDOUT = Path("-")


def _date(
    _context: click.Context, _parameter: click.Parameter, value: datetime.datetime | None
) -> datetime.date | None:
    return None if value is None else value.date()


def _resources(_context: click.Context, _parameter: click.Parameter, value: str | None) -> dict[str, float] | None:
    from edgespec.distributed.cluster import parse_resources

    return None if value is None else parse_resources(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions(InputOptions):
    """Which prompts are to be run, and what goes around them."""

    prompts: str | None = argument(required=False)
    prompts_file: str | None = option("-f", "--file", "-i", "--input", help="Read PROMPTS from this file.")
    prompt_text: str | None = option("-p", "--prompt", metavar="TEXT", help="Complete this prompt; - is stdin.")
    images: tuple[str, ...] = option("--image", multiple=True, metavar="FILE", help=IMAGE_HELP)
    start: int = option("--start", type=WholeNumber(), default=0, metavar="N", help="Skip the first N rows.")
    limit: int | None = option("--limit", type=WholeNumber(has_off=True), metavar="N", help="Run at most N rows.")
    only: tuple[str, ...] = option("--only", multiple=True, metavar="ID,...", help=ONLY_HELP)
    category: tuple[str, ...] = option("--category", multiple=True, metavar="NAME", help=CATEGORY_HELP)
    repeat: int = option("--repeat", type=WholeNumber(), default=1, metavar="R", help=REPEAT_HELP)
    system: str | None = option("--system", "--system-prompt", "-sys", help=SYSTEM_HELP)
    system_file: str | None = option("--system-file", metavar="FILE", help=SYSTEM_FILE_HELP)
    # None: today, or that of the results that are resumed
    day: datetime.date | None = option(
        "--day", type=click.DateTime(["%Y-%m-%d"]), callback=_date, metavar="YYYY-MM-DD", help=DAY_HELP
    )
    raw: bool = option("--raw", "--ignore-chat-template", is_flag=True, help=RAW_HELP)
    truncate: str = option(
        "--truncate", type=click.Choice(TRUNCATE), default="skip", show_default=True, help=TRUNCATE_HELP
    )
    selection: RowSelection = field(init=False)

    def __post_init__(self) -> None:
        InputOptions.__post_init__(self)
        if len(self._sources) != 1:
            raise click.UsageError("Give one source of prompts: PROMPTS, -f FILE or -p TEXT.")
        if self.source_format != "auto" and self.text is not None:
            raise click.UsageError(f"{self.flag} is for files; -p TEXT is one prompt.")
        if self.images and self.text is None:
            raise click.UsageError('--image goes with -p TEXT; rows of files have "images".')
        require_text("-p", self.prompt_text or "")
        ids = tuple(name.strip() for listed in self.only for name in listed.split(",") if name.strip())
        selection = RowSelection(
            only=ids, categories=self.category, start=self.start, limit=self.limit, repeat=self.repeat
        )
        settle(self, system=read_system(self.system, self.system_file), system_file=None, selection=selection)

    @property
    def _sources(self) -> list[str]:
        return [source for source in (self.prompts, self.prompts_file, self.prompt_text) if source is not None]

    @property
    def text(self) -> str | None:
        """A prompt itself."""
        return None if self.prompt_text == "-" else self.prompt_text

    @property
    def source(self) -> str | None:
        """A file, or - for stdin."""
        return self._sources[0] if self.text is None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions(DrawingOptions):
    """How texts are drawn where the rows do not say."""

    max_new_tokens: int = option(
        "-n", *LENGTH_SPELLINGS, type=WholeNumber(), default=DEFAULT_NEW_TOKENS, show_default=True, help=LENGTH_HELP
    )
    special_tokens: str = option(
        "--special-tokens", type=click.Choice(["keep", "drop"]), default="drop", show_default=True, help=SPECIAL_HELP
    )
    json_schema: str | None = option("--json-schema", "-j", metavar="FILE|JSON", help=SCHEMA_HELP)
    grammar: str | None = option("--grammar", metavar="FILE", help=GRAMMAR_HELP)
    compact_json: bool = option("--compact-json", is_flag=True, help=COMPACT_HELP)
    parsed: bool = option("--parsed", is_flag=True, help=PARSED_HELP)
    logprobs: int | None = option("--logprobs", type=WholeRange(0, MAX_LOGPROBS), metavar="N", help=LOGPROBS_HELP)
    echo_logprobs: bool = option("--echo-logprobs", is_flag=True, help=ECHO_HELP)
    text_grammar: Grammar | None = field(init=False)  # None: any text

    def __post_init__(self) -> None:
        DrawingOptions.__post_init__(self)
        if self.compact_json and self.json_schema is None:
            raise click.UsageError("--compact-json is for --json-schema.")
        settle(self, text_grammar=_read_grammar(self.json_schema, self.grammar, is_compact=self.compact_json))


def _read_grammar(json_schema: str | None, grammar: str | None, *, is_compact: bool) -> Grammar | None:
    """Return the grammar that the command line names, read; raises EdgespecError."""
    if json_schema is not None and grammar is not None:
        raise click.UsageError("A text has one grammar: give --json-schema or --grammar.")
    if json_schema is not None:
        is_file = not json_schema.lstrip().startswith("{")
        text = read_text(json_schema, what="a file, or JSON") if is_file else json_schema
        found = json_schema_grammar(text)
        return compact_json(found) if is_compact else found
    if grammar is not None:
        return Grammar(form="grammar", text=read_text(grammar, what="a file with a grammar"))
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """Where results go, and in which form."""

    path: Path | None = option(
        "-o", "--output", type=click.Path(path_type=Path), help="Write results to this file; - is stdout."
    )
    format_name: str | None = option("--format", type=click.Choice(FORMATS), help=FORMAT_HELP)
    resume: bool = option("--resume", is_flag=True, help=RESUME_HELP)
    overwrite: bool = option("--overwrite", is_flag=True, help=OVERWRITE_HELP)
    force: bool = option("--force", is_flag=True, help=FORCE_HELP)
    fail_fast: bool = option("--fail-fast", is_flag=True, help="End the run at the first prompt that fails.")
    live_text: bool = option("--stream", is_flag=True, help="Show the text on stderr while records are written.")
    ordered: bool = option("--ordered", is_flag=True, help=ORDERED_HELP)
    dry_run: bool = option("--dry-run", is_flag=True, help="Check everything, say what would be done, load nothing.")

    def __post_init__(self) -> None:
        settle(self, path=None if self.path == STDOUT else self.path)
        if self.resume and self.overwrite:
            raise click.UsageError("--resume continues a file, --overwrite begins it anew: give one of them.")
        if (self.resume or self.overwrite) and self.path is None:
            raise click.UsageError(
                f"--{'resume' if self.resume else 'overwrite'} is about an output file: give -o FILE."
            )
        if self.force and not self.resume:
            raise click.UsageError("--force belongs to --resume.")
        if self.resume and self.format_name == "text":
            raise click.UsageError("--resume needs results with ids, which --format text does not write.")

    @property
    def settled_format(self) -> str:
        """Return the results' format once it is chosen."""
        assert self.format_name is not None
        return self.format_name

    @property
    def shows_text(self) -> bool:
        """Return whether texts are shown while they are written, and so come one after the other."""
        return self.live_text or (self.format_name == "text" and self.path is None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairOptions(EngineOptions):
    """The pair, and how many texts it has under way."""

    parallel: int | None = option(
        "-np", "--parallel", type=NumberOrAuto("texts", check=check_num_texts), default="auto", show_default=True,
        metavar="auto|N", help=PARALLEL_HELP,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """The workers that a run is spread over; without an address it has this process alone."""

    address: str | None = option("--ray", is_flag=False, flag_value="auto", metavar="[ADDRESS|local]", help=RAY_HELP)
    num_workers: int | None = option("--workers", type=WholeRange(min=1), metavar="N", help=WORKERS_HELP)
    resources: Mapping[str, float] | None = option(
        "--resources", callback=_resources, metavar="cpu=4,gpu=1", help=RESOURCES_HELP
    )

    def __post_init__(self) -> None:
        if self.address is None and (self.num_workers is not None or self.resources is not None):
            raise click.UsageError("--workers and --resources belong to --ray.")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """All that the command line says."""

    prompts: PromptOptions = group(PromptOptions)
    output: OutputOptions = group(OutputOptions)
    sampling: SamplingOptions = group(SamplingOptions)
    pair_options: PairOptions = group(PairOptions)
    workers: WorkerOptions = group(WorkerOptions)

    def __post_init__(self) -> None:
        self.pair_options.template.check(raw=self.prompts.raw)
        if self.workers.address is not None:
            self._check_with_workers()

    def _check_with_workers(self) -> None:
        """Raise UsageError for what a run on many workers cannot do."""
        if self.output.path is None:
            raise click.UsageError("--ray writes its records to a file: give -o FILE.")
        if self.output.live_text:
            raise click.UsageError("--stream shows one text after the other; with --ray many are under way.")
        if self.pair_options.corpus:
            raise click.UsageError("--corpus belongs to one process: leave it out with --ray.")
        if self.pair_options.prompt_cache is not None:
            raise click.UsageError("--prompt-cache is a file of one process: leave it out with --ray.")

    @property
    def refuses(self) -> bool:
        """Return whether a prompt that does not fit the context ends the run before it begins."""
        return self.output.fail_fast or self.prompts.truncate == "fail"
