"""Everything of a run that can be known, checked and refused before weights are read."""

from __future__ import annotations

import datetime
import secrets
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.chat.answer import answer_format_of
from edgespec.chat.template_date import asks_for_day
from edgespec.cli.console import Console, counted, named
from edgespec.cli.generate.formats import check_format
from edgespec.cli.generate.options import GenerateOptions, PairOptions, PromptOptions, SamplingOptions
from edgespec.cli.generate.output_file import OutputFile
from edgespec.cli.generate.record_config import record_config, trees_as_begun
from edgespec.cli.generate.requests import (
    EncodeTurn,
    NeededTokens,
    Request,
    RunSettings,
    make_requests,
    needed_tokens,
    turn_encoder,
)
from edgespec.cli.generate.resume import Results, check_same_run
from edgespec.cli.generate.truncate import fit
from edgespec.cli.open_engine import corpus_tokens
from edgespec.cli.open_pair import decided, open_pair_for
from edgespec.cli.prompts.batch_rows import DEFAULT_COMPLETION_TOKENS
from edgespec.cli.prompts.read import describe, numbered_rows, read_prompts
from edgespec.cli.prompts.report import say_unused_keys, template_notes
from edgespec.cli.prompts.rows import PromptRow, text_row, with_adapter_of_model, with_images
from edgespec.cli.prompts.selection import repeated, select
from edgespec.errors import EdgespecError
from edgespec.text.context import check_ctx_size, doubtful_ends
from edgespec.tree.settings import TreeOptions

if TYPE_CHECKING:
    from edgespec.cli.options.machine import MachineOptions
    from edgespec.pair.pair import ModelPair
    from edgespec.placement.pair_setup import PairSetup
    from edgespec.placement.pair_sizes import PairSizes
    from edgespec.placement.parallel import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """The rows of the input, those to run among them, and their results in an output file."""

    all: list[PromptRow]
    selected: list[PromptRow]
    results: Results | None  # None: nothing is resumed
    file: OutputFile | None  # that is written to; None: stdout, or nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequests:
    """The requests of a run, before a machine is chosen for it."""

    pair: ModelPair
    settings: RunSettings
    requests: list[Request]  # of all rows to run
    encode: EncodeTurn
    needed: NeededTokens  # of those that fit the context


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRun:
    """A run that only needs its models."""

    work: RunRequests  # also of rows that an output file has
    requests: list[Request]  # those still to run
    setup: PairSetup
    config: dict[str, Any]


def read_rows(
    console: Console, options: PromptOptions, format_name: str, adapters: Collection[str] = ()
) -> tuple[list[PromptRow], list[PromptRow]]:
    """Read all rows, which may name these adapters, and select those to run, both with their repeats.

    Raises EdgespecError.
    """
    if options.source is None:
        row = text_row(options.text or "", "-p", kind="text")
        rows = numbered_rows([with_images(row, options.images, Path()) if options.images else row])
    else:
        rows = read_prompts(options.source, input_format=options.source_format, say=console.say)
    rows = [with_adapter_of_model(row, adapters) for row in rows]
    selected = select(rows, options.selection)
    check_format(format_name, selected)
    console.say(describe(rows))
    if len(selected) < len(rows):
        console.say(f"selected: {len(selected)} of {len(rows)} rows")
    times = options.selection.repeat
    return repeated(rows, times), repeated(selected, times)


def prepare(console: Console, prompts: Prompts, options: GenerateOptions) -> GenerateRun:
    """Open the pair, settle every prompt's settings, and place the weights; raises EdgespecError."""
    work = make_run_requests(console, prompts, options)
    pair_options = replace(options.pair_options, parallel=1) if options.output.shows_text else options.pair_options
    with_draft = decided_for_rows(work.pair, pair_options, work.settings, work.needed)
    setup, config = _place_as_begun(console, replace(work, pair=with_draft), pair_options, prompts.results)
    report_ignored_settings(console, work.pair, prompts.selected, options.prompts)
    return GenerateRun(
        work=work, requests=still_to_run(console, prompts, options, work, config), setup=setup, config=config
    )


def make_run_requests(console: Console, prompts: Prompts, options: GenerateOptions) -> RunRequests:
    """Open the pair and settle every prompt's settings; raises EdgespecError."""
    pair_options, sampling = options.pair_options, options.sampling
    machine = pair_options.machine
    pair = open_pair_for(console, pair_options)
    check_ctx_size(machine.ctx_size, pair.max_context)
    max_context = machine.ctx_size or pair.max_context
    settings = RunSettings(
        sampling=sampling.sampling_of(pair),
        max_new_tokens=sampling.max_new_tokens,
        seed=_seed(sampling, prompts.results),
        raw=options.prompts.raw,
        system=options.prompts.system,
        day=_day(pair, options.prompts, prompts.results),
        stop=sampling.stop,
        prompt_logprobs=(sampling.logprobs or 0) if sampling.echo_logprobs else None,
        skip_special_tokens=sampling.special_tokens == "drop",
        grammar=sampling.text_grammar,
        parses=sampling.parsed,
        logprobs=sampling.logprobs,
        max_context=max_context,
    )
    rows = prompts.selected
    cuts = options.prompts.truncate in {"left", "right"}
    encode = turn_encoder(pair, settings, max_tokens=None if cuts else max_context)
    requests = make_requests(pair, rows, encode, settings)
    requests = fit(requests, options.prompts.truncate, encode, pair.tokenizer, max_context)
    _check_fit(requests, refuses=options.refuses)
    _report_lengths(console, requests)
    _report_ends(console, requests, pair)
    _report_raw(console, requests, pair, is_raw=settings.raw)
    _report_budgets(console, requests)
    return RunRequests(pair=pair, settings=settings, requests=requests, encode=encode, needed=needed_tokens(requests))


def _place_as_begun(
    console: Console, work: RunRequests, options: PairOptions, results: Results | None
) -> tuple[PairSetup, dict[str, Any]]:
    """Place the run, and return its configuration too; a resumed run has the trees that it was begun with."""

    def placed(trees: TreeOptions) -> tuple[PairSetup, dict[str, Any]]:
        setup = place_run(sizes, work.settings, replace(options, trees=trees), work.needed)
        return setup, record_config(setup, work.settings)

    sizes = pair_sizes(work.pair, options.machine, work.needed, corpus=options.corpus)
    first = placed(options.trees)
    if results is None or results.made_otherwise(first[-1]) is None:
        return first
    for trees in trees_as_begun(options.trees, results):
        other = placed(trees)
        if results.made_otherwise(other[-1]) is None:
            console.say(f"trees are those that '{results.path}' was begun with: profiles have changed since")
            return other
    return first


def decided_for_rows(pair: ModelPair, options: PairOptions, settings: RunSettings, needed: NeededTokens) -> ModelPair:
    """Return the pair with the one of its drafts that pays most for these rows, where one is still to be chosen."""
    return decided(
        pair, options, temperature=settings.sampling.temperature, workload=workload_of(options, needed),
        context_tokens=needed.context_tokens, prompt_tokens=needed.prompt_tokens,
        corpus_tokens=corpus_tokens(options.corpus),
    )  # fmt: skip


def workload_of(options: PairOptions, needed: NeededTokens) -> Workload:
    """Return the texts that wait for a run."""
    from edgespec.placement.parallel import Workload

    return Workload(num_waiting=needed.num_rows, mean_tokens=needed.mean_tokens, num_texts=options.parallel)


def pair_sizes(
    pair: ModelPair, machine: MachineOptions, needed: NeededTokens, *, corpus: Sequence[str] = ()
) -> PairSizes:
    """Return the pair's weights by size, and the memory for the longest text that is needed."""
    from edgespec.placement.pair_sizes import PairSizes

    tokens = {"context_tokens": needed.context_tokens, "prompt_tokens": needed.prompt_tokens}
    return PairSizes(pair, replace(machine.run_config(pair, **tokens), corpus_tokens=corpus_tokens(corpus)))


def place_run(sizes: PairSizes, settings: RunSettings, options: PairOptions, needed: NeededTokens) -> PairSetup:
    """Place the weights in this machine's memory, for as many texts as may be under way; raises EdgespecError."""
    from edgespec.placement.pair_setup import set_up_by_profile

    # The tree is chosen once, for the run's temperature; a row's own changes its sampling alone.
    return set_up_by_profile(
        sizes.pair,
        sizes.run_config,
        options.trees,
        temperature=settings.sampling.temperature,
        workload=workload_of(options, needed),
        sizes=sizes,
    )


def report_ignored_settings(console: Console, pair: ModelPair, rows: list[PromptRow], options: PromptOptions) -> None:
    """Say once what rows, options and template ask for and the run does not do."""
    say_unused_keys(console, rows)
    if options.day is not None and (options.raw or not asks_for_day(pair.tokenizer)):
        console.say("--day changes nothing: no chat template asks for it")
    names = {*pair.template_args, *(name for row in rows for name in row.settings.template_args or ())}
    if pair.tokenizer.chat_template and not options.raw:
        for note in template_notes(pair, names, has_system=any(row.has_system for row in rows) or bool(options.system)):
            console.say(note)
    elif names:
        console.say(f"not applied without a chat template: {', '.join(sorted(names))}")
    if not pair.tokenizer.chat_template and not options.raw:
        has_several = any(len(row.messages) > 1 or row.follow_ups or row.settings.system for row in rows)
        how = ", each message on a line of its own" if has_several or options.system else ""
        console.say(f"no chat template: prompts are read as they are{how}")


def still_to_run(
    console: Console, prompts: Prompts, options: GenerateOptions, work: RunRequests, config: dict[str, Any]
) -> list[Request]:
    """Return the requests whose results an output file lacks; raises EdgespecError where it is of another run."""
    requests = work.requests
    if prompts.results is not None:
        if not options.output.force:
            known = {request.row.id: request.row for request in requests}
            rows = [known.get(row.id, row) for row in prompts.all]
            check_same_run(prompts.results, rows, config, truncate=options.prompts.truncate)
        done = prompts.results.done
        requests = [request for request in requests if request.row.id not in done]
        _report_finished_rows(console, prompts.results, len(prompts.selected), len(requests), work.settings.seed)
        if requests:
            _check_fit(requests, refuses=options.refuses)
    return requests


def _check_fit(requests: list[Request], *, refuses: bool) -> None:
    """Raise the first fault of a request where one `refuses` the run, or where no request can be run."""
    faults = [(request.row, request.fault) for request in requests if request.fault is not None]
    too_long = [(row, fault) for row, fault in faults if row.fault is None]
    if faults and (len(faults) == len(requests) or (refuses and too_long)):
        row, fault = (too_long or faults)[0]
        raise EdgespecError(fault.code, f"{row.where}: {fault.what}", fault.fix)


def _report_lengths(console: Console, requests: list[Request]) -> None:
    """Say before the run which prompts are cut, and which do not fit."""
    for request in requests:
        if request.truncated is not None:
            dropped = counted(request.truncated.dropped_tokens, "token")
            where = {"left": "beginning", "right": "end"}[request.truncated.side]
            console.say(f"{request.row.where}: {dropped} dropped from the {where} of its prompt")
    rows = [request.row for request in requests]
    refused = [f"{row.where} ({row.fault.what.rstrip('.')})" for row in rows if row.fault is not None]
    if refused:
        console.say(f"not run, and errors in the records: {named(refused)}")
    completions = [row.where for row in rows if row.kind == "completion"]
    if completions:
        length = f"has {DEFAULT_COMPLETION_TOKENS} new tokens unless max_tokens says so"
        console.say(f"a row of /v1/completions is read without a template, and {length}: {named(completions)}")
    too_long = [request.row.where for request in requests if request.fault is not None and not request.row.fault]
    if too_long:
        console.say(f"too long for the context, and skipped: {named(too_long)} (--truncate left or right cuts)")


def _report_raw(console: Console, requests: list[Request], pair: ModelPair, *, is_raw: bool) -> None:
    """Say once where a grammar holds for a thought as well, since nothing says where that ends."""
    answer_format = answer_format_of(pair.tokenizer)
    if answer_format is None or not answer_format.thinks:
        return
    rows = [request.row for request in requests if request.grammar is not None]
    found = [row.where for row in rows if is_raw or row.kind == "completion"]
    if found:
        console.say(f"the grammar of a prompt without a template holds from its first token: {named(found)}")


def _report_budgets(console: Console, requests: list[Request]) -> None:
    """Say once where a thought may take all tokens that a text has."""
    found = [
        request.row.where
        for request in requests
        if request.thought_budget is not None
        and request.max_new_tokens > 0
        and request.thought_budget.leaves_nothing(request.max_new_tokens)
    ]
    if found:
        console.say(f"the budget of thought may leave no token for an answer: {named(found)}")


def _report_ends(console: Console, requests: list[Request], pair: ModelPair) -> None:
    """Say once of how many prompts the ends are in doubt."""
    doubts = Counter(doubt for request in requests for doubt in doubtful_ends(request.ids, pair))
    for doubt, count in doubts.items():
        console.say(f"{count} of {counted(len(requests), 'prompt')}: {doubt}")


def _seed(options: SamplingOptions, results: Results | None) -> int:
    """Return the seed that was given, or that of earlier results, so that a resumed run stays the same."""
    if options.seed is not None:
        return options.seed
    before = results.seed if results is not None else None
    return secrets.randbits(32) if before is None else before


def _day(pair: ModelPair, options: PromptOptions, results: Results | None) -> datetime.date | None:
    """Return the day for a chat template that needs one: as given, as results have it, or today."""
    if options.raw or not asks_for_day(pair.tokenizer):
        return None
    return options.day or (results.day if results is not None else None) or datetime.date.today()


def _report_finished_rows(console: Console, results: Results, num_selected: int, num_left: int, seed: int) -> None:
    torn = ", a torn last line is cut off" if results.is_torn else ""
    again = f", {len(results.failed)} failed and run again" if results.failed else ""
    done = f"{num_selected - num_left} of {num_selected} prompts are done{again}{torn}"
    console.say(f"resuming '{results.path}': {done}; seed {seed}")
