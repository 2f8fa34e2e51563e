"""`edgespec bench`: plain decoding against trees on the same prompts, and whether their greedy texts are equal."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from edgespec.cli.bench.report import FORMATS, write_report
from edgespec.cli.console import Console
from edgespec.cli.models.open_named import open_named_pair
from edgespec.cli.options.distribution import distribution_options
from edgespec.cli.options.options import (
    MachineOptions,
    check_all_resident,
    given_tree,
    machine_options,
    model_options,
    profile_option,
    tree_options,
)
from edgespec.cli.prompts.read import encode_prompts, read_prompts
from edgespec.cli.spelling import spelled
from edgespec.config import SamplingSettings
from edgespec.errors import EXIT_RUNTIME, EdgespecError
from edgespec.tree.settings import TreeSettings

if TYPE_CHECKING:
    from edgespec.decode.lossless import Verdict
    from edgespec.engine import Engine
    from edgespec.pair.pair import ModelPair
    from edgespec.profiled import Settled
    from edgespec.tune.benchmark import Round

PROMPTS_HELP = "Texts to continue, as for `edgespec generate`; of turns, the first. [default: six pieces of Python]"


@click.command(
    name="bench",
    epilog="""\b
Examples:
  edgespec bench                                    the built-in pair
  edgespec bench TARGET -md DRAFT --prompts prompts.jsonl -r 3 -n 128
  edgespec bench TARGET -md DRAFT -o jsonl >> results.jsonl
  edgespec bench TARGET -md DRAFT --check           is greedy text through trees the target's own?

Trees are those of the pair's profile where there is one; tree options
override it. Speeds are medians of the repeats, with the lowest and the
highest. Both modes use the memory plan of the pair with its draft.
""",
)
@click.argument("target", required=False, type=click.Path(path_type=Path))
@model_options
@click.option("--prompts", help=PROMPTS_HELP)
@click.option("--lines", is_flag=True, help="The file holds one prompt a line.")
@click.option("--raw", "--ignore-chat-template", "raw", is_flag=True, help="Do not apply the model's chat template.")
@click.option("--limit", type=click.IntRange(1), help="Only so many of the prompts.")
@click.option("-r", "--repeats", type=click.IntRange(1), default=5, show_default=True, help="Rounds of all prompts.")
@click.option("-n", "--max-new-tokens", type=click.IntRange(2), default=64, show_default=True, help="Of every text.")
@distribution_options(has_greedy=False)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the draws.")
@click.option("--check", is_flag=True, help="Instead of timing, compare greedy texts; exit code 1 when they differ.")
@click.option("-o", "--format", "form", type=click.Choice(FORMATS), default="md", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="The same as -o json.")
@tree_options
@profile_option
@machine_options
@click.option("-q", "--quiet", is_flag=True, help="Print errors only.")
def command(
    *,
    target: Path | None,
    model: Path | None,
    draft_model: Path | None,
    prompts: str | None,
    lines: bool,
    raw: bool,
    limit: int | None,
    repeats: int,
    max_new_tokens: int,
    chosen: dict[str, Any],
    seed: int,
    check: bool,
    form: str,
    as_json: bool,
    tree: TreeSettings,
    profile: str,
    machine: MachineOptions,
    quiet: bool,
) -> int:
    """Compare trees with plain decoding.

    The same prompts are decoded plainly and through trees, in turn, and tokens a second compared. With
    --check, greedy texts through trees must equal plain decoding's, and each token the target's argmax when
    the text is read again; near ties are told apart.
    """
    console = Console(quiet=quiet, verbose=False)
    if tree.policy == "none":
        raise EdgespecError("E_SETTING", "--policy none leaves nothing to compare.", "Leave it out, or name a policy.")
    if not tree.is_lossless and check:
        raise EdgespecError("E_SETTING", "--target-width above 1 is lossy.", "Leave it out with --check.")
    if draft_model is not None and (target or model) is None:
        raise click.UsageError("-md needs a target.")
    context = click.get_current_context()
    if check:
        _refuse_with_check(context, form)
    rows = read_prompts(prompts, lines=lines) if prompts else None

    # torch and transformers are imported from here on.
    from edgespec.pair.pair import DEMO_FOLDER
    from edgespec.tune.benchmark import race

    pair = open_named_pair(target or model, draft_model)
    if pair.draft is None:
        raise EdgespecError("E_SETTING", "there is no draft to grow trees with.", "Name one with -md.")
    sampling = SamplingSettings() if check else replace(pair.default_sampling(), **chosen)
    rows = rows or read_prompts(str(DEMO_FOLDER / "prompts.jsonl"), lines=False)
    rows = rows[:limit]
    ignored = sorted({name for row in rows for name in row.settings.given()})
    if ignored:
        console.say(f"not applied, so that all prompts run alike: {', '.join(ignored)} of the rows")
    encoded = encode_prompts(pair, rows, raw=raw or prompts is None)
    with _open(console, pair, encoded, context, profile, machine, sampling, max_new_tokens) as engine:
        with console.progress_bar() as bar:
            if check:
                return _check(console, engine, encoded, max_new_tokens, as_json=as_json or form in {"json", "jsonl"})
            rounds = race(
                engine,
                encoded,
                sampling=sampling,
                max_new_tokens=max_new_tokens,
                repeats=repeats,
                seed=seed,
                progress=console.counting(bar, "decoding", "texts"),
            )
        write_report(engine, rounds, sampling, form="json" if as_json else form)
        _say_what_else(console, engine, machine, rounds)
    return 0


def _refuse_with_check(context: click.Context, form: str) -> None:
    """Raise click.UsageError for options that mean nothing to --check."""
    for option in context.command.params:
        is_given = context.get_parameter_source(str(option.name)) is ParameterSource.COMMANDLINE
        if is_given and option.name in {"repeats", "temperature", "top_k", "top_p", "min_p", "seed"}:
            raise click.UsageError(
                f"{max(option.opts, key=len)} does not go with --check: it is greedy, and not timed."
            )
    if form == "csv":
        raise click.UsageError("-o csv does not go with --check: use md or json.")


def _open(
    console: Console,
    pair: ModelPair,
    encoded: list[list[int]],
    context: click.Context,
    profile: str,
    machine: MachineOptions,
    sampling: SamplingSettings,
    max_new_tokens: int,
) -> Engine:
    """Load the pair with the trees that it is to be measured with."""
    from edgespec.engine import Engine
    from edgespec.model.device import resolve_device
    from edgespec.profiled import settle

    longest = max(map(len, encoded))
    context_tokens = machine.ctx_size or longest + max_new_tokens
    if pair.max_context is not None and longest + max_new_tokens > min(context_tokens, pair.max_context):
        raise EdgespecError(
            "E_CONTEXT",
            f"the longest prompt has {longest} tokens, with {max_new_tokens} new ones more than the context of "
            f"{min(context_tokens, pair.max_context)}.",
            "Shorten the prompts, or lower -n.",
        )
    settled = settle(
        pair,
        source=profile,
        given=given_tree(context),
        temperature=sampling.temperature,
        limits=machine.limits,
        device=resolve_device(machine.device),
        dtype=machine.dtype,
        quant=machine.quant,
        draft_quant=machine.draft_quant,
        context_tokens=context_tokens,
        prompt_tokens=longest,
    )
    for note in settled.notes:
        console.say(spelled(note))

    def on_plan(engine: Engine) -> None:
        placement = engine.placement
        console.say(
            f"{pair.target.folder}: {placement.num_resident} of {placement.num_layers} layers resident; "
            f"{engine.tree.policy} trees of up to {engine.tree.num_nodes} nodes against plain decoding"
        )
        check_all_resident(machine, placement.num_resident, placement.num_layers)

    return Engine(
        pair,
        tree=_measured_tree(console, settled),
        profile=settled.profile,
        limits=machine.limits,
        device=machine.device,
        dtype=machine.dtype,
        quant=machine.quant,
        draft_quant=machine.draft_quant,
        context_tokens=context_tokens,
        prompt_tokens=longest,
        on_plan=on_plan,
    )


def _say_what_else(console: Console, engine: Engine, machine: MachineOptions, rounds: dict[str, list[Round]]) -> None:
    """Say what the table does not show: that plain decoding is the better choice, or would have had more memory."""
    from edgespec.model.target import offload_errors
    from edgespec.placement.plan import plan_pair

    medians = {mode: statistics.median(found.tokens_per_s for found in own) for mode, own in rounds.items()}
    if medians["tree"] < medians["plain"]:
        console.say("trees are slower than plain decoding here; edgespec profile finds settings that are not, or none")
    with offload_errors():
        alone = plan_pair(
            engine.pair.target,
            None,
            tree=engine.tree.plain(),
            limits=machine.limits,
            device=engine.device,
            dtype=engine.dtype,
            quant=engine.quant,
            draft_quant=None,
            context_tokens=engine.max_context,
            prompt_tokens=engine.max_context,
        ).placement.num_resident
    if alone > engine.placement.num_resident:
        console.say(
            f"without the draft in memory, {alone} layers instead of {engine.placement.num_resident} could stay "
            "resident: plain decoding by itself is faster than here"
        )


def _measured_tree(console: Console, settled: Settled) -> TreeSettings:
    """Return the settings' trees; where the plan is to grow none, the next best that the plan knows."""
    from edgespec.profiled import tree_settings

    if settled.tree.policy != "none":
        return settled.tree
    assert settled.plan is not None
    second = settled.plan.runner_up
    tree = tree_settings(second) if second is not None and second.policy != "none" else TreeSettings()
    console.say(f"the profile's plan is plain decoding; measured against it: {tree.policy} trees")
    return tree


def _check(console: Console, engine: Engine, encoded: list[list[int]], max_new_tokens: int, *, as_json: bool) -> int:
    """Compare the greedy texts of both modes and return the exit status."""
    from edgespec.cli.bench.report import write_verdicts

    verdicts: list[Verdict] = []
    for number, ids in enumerate(encoded, start=1):
        verdicts += engine.verify_lossless([ids], max_new_tokens=max_new_tokens)
        console.say_sometimes(f"checking: {number} of {len(encoded)} texts")
    write_verdicts(engine, verdicts, as_json=as_json)
    return 0 if all(verdict.is_lossless for verdict in verdicts) else EXIT_RUNTIME
