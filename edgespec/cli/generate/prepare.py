"""Everything of a run that can be known, checked and refused before weights are read."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.cli.console import Console
from edgespec.cli.generate.formats import check_format
from edgespec.cli.generate.options import AskedOutput, AskedPrompts, AskedSampling
from edgespec.cli.generate.requests import (
    EncodeTurn,
    Request,
    Room,
    RunSettings,
    make_requests,
    needed_room,
    turn_encoder,
)
from edgespec.cli.generate.resume import Results, check_same_run
from edgespec.cli.generate.run_config import run_config
from edgespec.cli.models.open_named import open_named_pair
from edgespec.cli.options.options import MachineOptions
from edgespec.cli.prompts.read import describe, encode_prompts, numbered_rows, read_prompts
from edgespec.cli.prompts.rows import PromptRow, text_row
from edgespec.cli.prompts.selection import repeated, select
from edgespec.cli.spelling import spelled
from edgespec.tree.settings import TreeSettings

if TYPE_CHECKING:
    import torch

    from edgespec.pair.pair import ModelPair
    from edgespec.profiled import Settled


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """The rows of the input, those that are wanted among them, and what an output file has of them."""

    all: list[PromptRow]
    wanted: list[PromptRow]
    results: Results | None  # None: nothing is resumed


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A run that only needs its models."""

    pair: ModelPair
    settings: RunSettings
    settled: Settled
    tree: TreeSettings
    device: torch.device
    dtype: torch.dtype
    requests: list[Request]  # those still to run
    encode: EncodeTurn
    room: Room  # of all that are wanted
    config: dict[str, Any]


def read_rows(console: Console, asked: AskedPrompts, format_name: str) -> tuple[list[PromptRow], list[PromptRow]]:
    """Read all rows and choose the wanted ones, both with their repeats; raises EdgespecError."""
    if asked.source is None:
        rows = numbered_rows([text_row(asked.text or "", "-p", kind="text")])
    else:
        rows = read_prompts(asked.source, lines=asked.lines)
    wanted = select(rows, asked.selection)
    check_format(format_name, wanted)
    console.say(describe(rows))
    if len(wanted) < len(rows):
        console.say(f"selected: {len(wanted)} of {len(rows)} rows")
    times = asked.selection.repeat
    return repeated(rows, times), repeated(wanted, times)


def prepare(
    console: Console,
    prompts: Prompts,
    asked: AskedPrompts,
    wanted: AskedSampling,
    out: AskedOutput,
    *,
    model: Path | None,
    draft_model: Path | None,
    tree: TreeSettings,
    given_tree: dict[str, Any],
    profile: str,
    machine: MachineOptions,
) -> Prepared:
    """Open the pair, settle every prompt's settings, and plan; raises EdgespecError."""
    from edgespec.model.device import resolve_device, resolve_dtype
    from edgespec.profiled import settle

    pair = open_named_pair(model, draft_model)
    if pair.draft is None and tree.policy != "none":
        console.say("no draft (-md): decoding plainly, one token a pass")
    if tree.policy == "none":
        pair = replace(pair, draft=None)  # it was checked, and is not used
    settings = RunSettings(
        sampling=replace(pair.default_sampling(), **wanted.chosen),
        max_new_tokens=wanted.max_new_tokens,
        seed=secrets.randbits(32) if wanted.seed is None else wanted.seed,
        seed_is_given=wanted.seed is not None,
        raw=asked.raw,
        system=asked.system,
        stop=wanted.stop,
    )
    rows = prompts.wanted
    encoded = encode_prompts(pair, rows, raw=asked.raw, system=asked.system)
    requests = make_requests(rows, encoded, settings)
    encode = turn_encoder(pair, settings)
    room = needed_room(pair, requests, encode, ctx_size=machine.ctx_size)
    device = resolve_device(machine.device)
    # The tree is chosen once, for the run's temperature; a row's own changes its sampling alone.
    settled = settle(
        pair,
        source=profile,
        given=given_tree,
        temperature=settings.sampling.temperature,
        limits=machine.limits,
        device=device,
        dtype=machine.dtype,
        quant=machine.quant,
        draft_quant=machine.draft_quant,
        context_tokens=room.context_tokens,
        prompt_tokens=room.prompt_tokens,
    )
    for note in settled.notes:
        console.say(spelled(note))
    _say_what_is_not_applied(console, pair, rows, asked)
    settings = replace(
        settings,
        profile=settled.profile.name if settled.profile else None,
        predicted_per_s=settled.predicted_per_s,
    )
    tree = settled.tree if pair.draft is not None else settled.tree.plain()
    dtype = resolve_dtype(machine.dtype, pair.target.config, device)
    config = run_config(
        pair, settings, tree, device=device, dtype=dtype, quant=machine.quant, draft_quant=machine.draft_quant
    )
    if prompts.results is not None:
        if not out.force:
            check_same_run(prompts.results, prompts.all, config)
        done = prompts.results.done
        requests = [request for request in requests if request.row.id not in done]
        _say_what_is_done(console, prompts.results, len(rows), len(requests))
    return Prepared(
        pair=pair,
        settings=settings,
        settled=settled,
        tree=tree,
        device=device,
        dtype=dtype,
        requests=requests,
        encode=encode,
        room=room,
        config=config,
    )


def _say_what_is_done(console: Console, results: Results, num_wanted: int, num_left: int) -> None:
    torn = ", a torn last line is cut off" if results.is_torn else ""
    again = f", {len(results.failed)} failed and run again" if results.failed else ""
    console.say(f"resuming '{results.path}': {num_wanted - num_left} of {num_wanted} prompts are done{again}{torn}")


def _say_what_is_not_applied(console: Console, pair: ModelPair, rows: list[PromptRow], asked: AskedPrompts) -> None:
    """Say once what rows, model or template ask for and this run does not do."""
    ignored = sorted({key for row in rows for key in row.ignored_keys})
    if ignored:
        console.say(f"not applied, only handed through to the records: {', '.join(ignored)} of the rows")
    penalty = pair.target.generation_config.get("repetition_penalty") or 1.0
    if penalty != 1.0:
        console.say(f"not applied: repetition_penalty {penalty} of the model's generation_config.json")
    if not pair.tokenizer.chat_template and not asked.raw:
        has_several = any(len(row.messages) > 1 or row.follow_ups or row.settings.system for row in rows)
        how = ", each message on a line of its own" if has_several or asked.system else ""
        console.say(f"no chat template: prompts are read as they are{how}")
