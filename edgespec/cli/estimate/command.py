"""`edgespec estimate`: memory and speed of a pair, from headers or a bare config, without loading it.

The speed is that of this machine, which is measured once, or with --hardware of another, by data sheets and the
assumptions of `profiles/builtin`.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.console import Console, counted, write_lines
from edgespec.cli.ctrl_c import import_engine
from edgespec.cli.estimate.drafts import draft_facts, draft_lines, drafts_that_fit
from edgespec.cli.estimate.here import is_here, measured_here
from edgespec.cli.estimate.speeds import (
    estimate_speeds,
    refuse_other_device,
    refuse_without_hardware,
    speed_facts,
    speed_lines,
)
from edgespec.cli.open_engine import say_notes
from edgespec.cli.open_pair import naming_drafts
from edgespec.cli.options.machine import PlanOptions, check_all_resident
from edgespec.cli.options.model import ModelOptions, adapted_options_with_target
from edgespec.cli.options.numbers import WholeRange
from edgespec.cli.options.record import option, options_of
from edgespec.cli.options.tree import TreeFlags, make_tree_options
from edgespec.cli.spelling import spelled
from edgespec.config import SamplingSettings, require
from edgespec.hub.names import AUTO
from edgespec.text.context import check_ctx_size
from edgespec.tree.settings import TreeOptions

if TYPE_CHECKING:
    from edgespec.pair.folder import ModelFolder
    from edgespec.placement.place import PlacedWeights
    from edgespec.placement.weights import Weights

GIB = 1 << 30
HARDWARE_HELP = "Estimate for another machine's card or CPU: 4090, 'RTX 4070 Ti', a100-40gb, cpu, ..."


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateOptions:
    """The run to estimate, and the form of the report."""

    parallel: int = option(
        "-np",
        "--parallel",
        type=WholeRange(1),
        default=1,
        show_default=True,
        metavar="N",
        help="Decode this many texts in each pass.",
    )
    prompt_tokens: int | None = option(
        "--prompt-tokens", type=WholeRange(1), help="Set the longest prompt. [default: the whole context]"
    )
    hardware: str | None = option("--hardware", metavar="NAME", help=HARDWARE_HELP)
    measure: bool = option("--measure", is_flag=True, help="Measure this machine's speeds again; they are kept.")
    temperature: float | None = option(
        "--temp", "--temperature", type=float, help="Set the temperature of the acceptance. [default: 0]"
    )
    as_json: bool = option("--json", is_flag=True, help="Write one JSON object to stdout.")


@click.command(
    name="estimate",
    epilog="""\b
Examples:
  edgespec estimate -m TARGET -md DRAFT                       this machine
  edgespec estimate -m TARGET -md DRAFT --measure             ... whose speeds are measured again
  edgespec estimate -m TARGET --device cuda --max-gpu-mem 12GiB --max-cpu-mem 48GiB --quant nf4
  edgespec estimate CONFIG_DIR --json                         a folder with config.json alone
  edgespec estimate -m TARGET -md DRAFT --hardware rtx-4090   and the speed on a card that is not here
  edgespec estimate -m TARGET -md DRAFT --hardware rtx-4090 --acceptance 0.8 --max-cpu-mem 128GiB

--acceptance is a file of measurements, or the chance that a first child is
accepted; the others follow a power law (Sequoia). Without it Llama models have
the published 0.79 (DySpec), others that of the built-in pair. Speeds count
after the prompt is read, with the context full.
""",
)
@adapted_options_with_target
@options_of(TreeFlags, handed_on_as="trees", made=make_tree_options)
@options_of(PlanOptions, handed_on_as="machine")
@options_of(EstimateOptions, handed_on_as="options")
def command(*, models: ModelOptions, trees: TreeOptions, machine: PlanOptions, options: EstimateOptions) -> int:
    """Say what would live where, in GiB, and how fast it would be. Reads headers only.

    This machine's memory, arithmetic and disk are measured once. A card that is not there is described by --hardware,
    or by --max-gpu-mem alone, without its speed.

    Exit code 5, with the same table, when the pair does not fit.
    """
    import_engine(Console(quiet=False, verbose=False))
    import torch

    from edgespec.estimate.choice import DraftTrees, ReckonedDraft, best_of, reckon_drafts
    from edgespec.estimate.speed import PairOnHardware, locked_bytes_here, memory_there, open_hardware
    from edgespec.model.self_check import check_tree_reading
    from edgespec.pair.adapters import open_adapters
    from edgespec.pair.drafts import planned_draft
    from edgespec.pair.folder import open_architecture
    from edgespec.pair.mtp import without_description
    from edgespec.pair.pair import DEMO_FOLDER, adapted_draft, check_vocabularies
    from edgespec.pair.tree_support import check_may_draft, notes_of_support, supported_trees, tree_support
    from edgespec.placement.copied_layers import deep_trees, notes_of_copy
    from edgespec.placement.own_layer import acceptance_of_layer, steps_at, steps_here, weigh_own_layer
    from edgespec.placement.pass_load import moved_bytes
    from edgespec.placement.place import pair_weights, place_weights, read_memory
    from edgespec.placement.run_config import DEFAULT_CONTEXT_TOKENS, resolve_run_config
    from edgespec.placement.weights import notes_of_weights

    temperature, num_texts = options.temperature, options.parallel
    if temperature is not None:
        SamplingSettings(temperature=temperature)  # raises for a wrong temperature

    folder, tree = models.target, trees.settings
    target_model = open_architecture(folder or DEMO_FOLDER / "target")
    draft_folder = models.draft or (None if folder or models.drafts else DEMO_FOLDER / "draft")
    draft, several = None, () if draft_folder or not tree.needs_draft else models.drafts or (AUTO,)
    if tree.needs_draft and not models.drafts:
        target_model, draft = planned_draft(draft_folder, target_model)
    tree = tree if "depth" in trees.explicit else deep_trees(tree, draft)
    with naming_drafts(models):
        check_vocabularies(target_model, draft, models.tokenizer)
        at_hand = drafts_that_fit(several, target_model, models.tokenizer)
        given = open_adapters(models.adapters, target_model.config.get_text_config(decoder=True))
        target_model = replace(target_model, adapters=given)
        draft = draft and adapted_draft(draft, given, models.draft_adapters)
        at_hand = tuple(
            replace(one, model=one.model and adapted_draft(one.model, given, models.draft_adapters)) for one in at_hand
        )
    card = open_hardware(options.hardware) if options.hardware is not None else None
    if card is not None:
        refuse_other_device(card[0].name, machine.device, card[0].device)
        machine = replace(machine, device=card[0].device)
    limit = target_model.max_context
    context_tokens = machine.ctx_size or min(DEFAULT_CONTEXT_TOKENS, limit or DEFAULT_CONTEXT_TOKENS)
    check_ctx_size(context_tokens, limit)
    prompt_tokens = min(options.prompt_tokens or context_tokens, context_tokens)
    run_options = machine.options(context_tokens=context_tokens, prompt_tokens=prompt_tokens)
    run_options["parallel"] = num_texts
    run_config = resolve_run_config(target_model, None, draft=draft, is_planned_only=True, **run_options)
    keeps = run_config.needs_row_bits
    tree = supported_trees(target_model, tree, has_draft=draft is not None, keeps_row_bits=keeps)
    tree = tree.plain() if draft is None else tree
    device_name = str(run_config.device) if card is None else card[0].name
    is_measured = card is None and is_here(run_config.device)
    require(
        is_measured or not options.measure,
        f"--measure measures this machine, and {'' if card is None else '--hardware '}{device_name} is another.",
        "Leave out one of them.",
    )
    if card is None and not is_measured:
        refuse_without_hardware(tree, temperature)
        require(
            not models.drafts,
            "which of several drafts pays depends on the machine.",
            "Name a card: --hardware rtx-4090.",
        )
    weights = pair_weights(target_model, draft, run_config)
    memory = (
        read_memory(run_config.limits, run_config.device) if card is None else memory_there(*card, run_config.limits)
    )
    place = partial(place_weights, run_config=run_config, memory=memory)
    is_own_layer = draft_folder is None and draft is not None
    if card is None:
        place(weights, tree.plain() if is_own_layer else tree)  # what does not fit is not measured for
        card = measured_here(run_config.device, target_model, again=options.measure) if is_measured else None
    of_layer: tuple[str, ...] = ()
    if is_own_layer and draft is not None:
        step_of = steps_at(*card, run_config) if card else steps_here(run_config, target_model.checkpoint)
        acceptance = acceptance_of_layer(weights, tree, temperature)
        found = weigh_own_layer(tree, partial(place, weights), step_of, acceptance)
        of_layer, draft = (found.why,), without_description(draft) if found.drafts else None
        if draft is None:
            weights, tree = replace(weights, draft=None), tree.plain()
    on_card, reckoned = None, list[ReckonedDraft]()
    if card is not None:
        on_card = PairOnHardware(
            weights=weights, hardware=card[0], assumptions=card[1], run_config=run_config, memory=memory,
            draws=bool(temperature), locked_bytes=locked_bytes_here(card[1]) if is_measured else math.inf,
            is_here=is_measured,
        )  # fmt: skip
        grown = DraftTrees.given(replace(trees, profile="auto"))  # as a run here would have it
        reckoned = reckon_drafts(on_card, at_hand, grown, temperature=temperature, **run_options)
    if models.drafts and reckoned:
        best = best_of(reckoned)
        on_card, tree, draft = best.pair, best.tree, best.draft.model
        run_config, weights = best.pair.run_config, best.pair.weights
    check_may_draft(target_model, draft)  # what would be refused when it is loaded
    if weights.draft is not None:
        check_tree_reading(weights.draft.skeleton.model.config, device=torch.device("cpu"))
    if card is None:
        plan = place(weights, tree)
    speeds = None
    if on_card is not None:
        size = trees.explicit.get("size")  # one that is not given is any: the settings hold a default
        speeds = estimate_speeds(on_card, tree, temperature=temperature, size=size, is_built_in=folder is None)
        plan = speeds.weights
    check_all_resident(machine, plan)
    console = Console(quiet=False, verbose=False)
    say_notes(console, target_model, draft)
    notes = notes_of_weights(weights.target, weights.draft, context_tokens=context_tokens, device=run_config.device)
    notes += notes_of_copy(plan.target, plan.draft, plan.placement)
    for note in (*notes_of_support(target_model, keeps_row_bits=keeps), *of_layer, *notes):
        console.say(spelled(note))
    settings = {
        "device": device_name,
        "dtype": str(run_config.dtype).removeprefix("torch."),
        "context_tokens": context_tokens,
        "texts": num_texts,
        "decoding": tree_support(target_model).name,
        "tree_size": tree.num_nodes if speeds is None else (speeds.tree or speeds.plain).nodes,
        "pass_bytes": moved_bytes(plan.target, plan.placement),
    }
    draft_table = draft_facts(reckoned, lookup_tokens=card[1].lookup_tokens) if card is not None else []
    if options.as_json:
        more: dict[str, Any] = {} if speeds is None else {"speed": speed_facts(speeds)}
        more |= {"drafts": draft_table} if draft_table else {}
        sys.stdout.write(json.dumps({**settings, **_facts(plan), **more}) + "\n")
    else:
        speed = [] if speeds is None else speed_lines(speeds)
        speed += draft_lines(draft_table, best_of(reckoned).draft.name) if draft_table else []
        write_lines("\n".join([*_lines(plan, settings), *speed]))
    return 0


def _lines(plan: PlacedWeights, settings: dict[str, Any]) -> list[str]:
    placement = plan.placement
    lines = [_model_line("target", plan.target)]
    if plan.draft is not None:
        lines.append(_model_line("draft", plan.draft))
    nodes = f"trees of {counted(settings['tree_size'], 'node')}" if settings["tree_size"] else "no tree"
    texts = f"{settings['texts']} texts under way, " if settings["texts"] > 1 else ""
    lines.append(
        f"{settings['dtype']} on {settings['device']}, {texts}{nodes}, context of {settings['context_tokens']} tokens"
    )
    streamed = placement.num_layers - placement.num_resident
    # A pass reads the experts that its rows choose, and keys and values as far as texts have come.
    at_most = "" if placement.experts is None and not placement.waiting_keys else "at most "
    waiting = f", keys and values of {len(placement.waiting_keys)} in RAM" if placement.waiting_keys else ""
    lines.append(
        f"{placement.num_resident} of {placement.num_layers} layers resident, {placement.num_pinned} in RAM, "
        f"{placement.num_on_disk} on disk{waiting}"
        + (f"; {at_most}{settings['pass_bytes'] / GIB:.3f} GiB move in each pass" if streamed else "")
    )
    return [*lines, placement.table()]


def _model_line(role: str, weights: Weights) -> str:
    model: ModelFolder = weights.model
    count, unit = (weights.num_parameters / 1e9, "B") if weights.num_parameters >= 1e9 else (
        weights.num_parameters / 1e6, "M")  # fmt: skip
    is_there = not any(entry.is_planned for entry in model.checkpoint.tensors.values())
    size = f"{model.checkpoint.num_bytes / GIB:.3f} GiB in its files" if is_there else "no weights there"
    quant = f", layers as {weights.formats}" if weights.formats else ""
    left_out = "".join(f"; {note}" for note in weights.unread_notes)
    return f"{role}: {model.named} ({model.config.model_type}, {count:.3g} {unit} parameters, {size}{quant}{left_out})"


def _facts(plan: PlacedWeights) -> dict[str, Any]:
    placement = plan.placement
    return {
        "target": str(plan.target.model.folder),
        "draft": str(plan.draft.model.named) if plan.draft else None,
        "target_parameters": plan.target.num_parameters,
        "draft_parameters": plan.draft.num_parameters if plan.draft else None,
        "unread_parameters": plan.target.skeleton.num_unread,
        "quant": plan.target.formats or "none",
        "adapters": {one.name: one.num_bytes for one in plan.target.adapters},
        "layers": placement.num_layers,
        "resident_layers": placement.num_resident,
        "ram_layers": placement.num_pinned,
        "disk_layers": placement.num_on_disk,
        "device_bytes": placement.device_bytes,
        "device_total_bytes": placement.planned_bytes,
        "device_budget_bytes": placement.device_budget_bytes,
        "host_bytes": placement.host_bytes,
        "host_budget_bytes": placement.host_budget_bytes,
    }
