"""`edgespec bench`: plain decoding against trees on the same prompts, and whether their texts are equal."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from edgespec.cli.bench.report import FORMATS, write_report
from edgespec.cli.console import Console
from edgespec.cli.ctrl_c import import_engine
from edgespec.cli.open_engine import open_engine
from edgespec.cli.open_pair import open_pair_with_draft
from edgespec.cli.options.console import console_options
from edgespec.cli.options.distribution import distribution_options
from edgespec.cli.options.machine import MachineOptions, machine_options
from edgespec.cli.options.model import ModelOptions, model_options
from edgespec.cli.options.numbers import WholeRange
from edgespec.cli.options.prompts import input_options
from edgespec.cli.options.tree import TreeOptions, tree_options
from edgespec.cli.prompts.read import encode_prompts, read_prompts
from edgespec.cli.prompts.report import say_unused_keys
from edgespec.errors import EXIT_RUNTIME, EdgespecError
from edgespec.tree.settings import TreeSettings

if TYPE_CHECKING:
    from edgespec.config import SamplingSettings
    from edgespec.decode.lossless import Verdict
    from edgespec.doctor.benchmark import Round
    from edgespec.engine import Engine
    from edgespec.pair.pair import ModelPair
    from edgespec.placement.pair_setup import PairSetup
    from edgespec.placement.pair_sizes import PairSizes
    from edgespec.placement.run_config import RunConfig
    from edgespec.text.request import TextOptions

PROMPTS_HELP = "Texts to continue, as for `edgespec generate`; of turns, the first. [default: six pieces of Python]"


@click.command(
    name="bench",
    epilog="""\b
Examples:
  edgespec bench                                    the built-in pair
  edgespec bench TARGET -md DRAFT --prompts prompts.jsonl -r 3 -n 128
  edgespec bench TARGET -md DRAFT -o jsonl >> results.jsonl
  edgespec bench TARGET -md DRAFT --policies opt-tree,eagle2,sequoia
  edgespec bench TARGET -md DRAFT --check           is the text through trees the target's own?

Trees are those of the pair's profile where there is one; tree options
override it. Speeds are medians of the repeats, the speed-up with its lowest
and highest. Both modes use the memory plan of the pair with its draft.
""",
)
@click.argument("target", required=False, type=click.Path(path_type=Path))
@model_options
@click.option("--prompts", help=PROMPTS_HELP)
@input_options
@click.option("--raw", "--ignore-chat-template", "raw", is_flag=True, help="Do not apply the model's chat template.")
@click.option("--limit", type=WholeRange(1), help="Only so many of the prompts.")
@click.option("-r", "--repeats", type=WholeRange(1), default=5, show_default=True, help="Rounds of all prompts.")
@click.option("-n", "--max-new-tokens", type=WholeRange(2), default=64, show_default=True, help="Of every text.")
@distribution_options(has_greedy=False)
@click.option("--seed", type=WholeRange(0), default=0, show_default=True, help="Of the draws.")
@click.option("--policies", default="", help="Compare trees of these policies too, as opt-tree,eagle2.")
@click.option("--check", is_flag=True, help="Instead of timing, compare texts; exit code 1 when they differ.")
@click.option("-o", "--format", "form", type=click.Choice(FORMATS), default="md", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="The same as -o json.")
@tree_options(has_profile=True)
@machine_options
@console_options()
def command(
    *,
    models: ModelOptions,
    prompts: str | None,
    input_form: str,
    raw: bool,
    limit: int | None,
    repeats: int,
    max_new_tokens: int,
    chosen: dict[str, Any],
    seed: int,
    policies: str,
    check: bool,
    form: str,
    as_json: bool,
    trees: TreeOptions,
    machine: MachineOptions,
    console: Console,
) -> int:
    """Compare trees with plain decoding.

    The same prompts are decoded plainly and through trees, in turn, and tokens a second compared. With
    --check, texts through trees must equal plain decoding's of the same seed, and each token must be the
    target's own when the text is read again; near ties are told apart.
    """
    if trees.settings.policy == "none":
        raise EdgespecError("E_SETTING", "--policy none leaves nothing to compare.", "Leave it out, or name a policy.")
    if not trees.settings.is_lossless and check:
        raise EdgespecError("E_SETTING", "--target-width above 1 is lossy.", "Leave it out with --check.")
    names = list(dict.fromkeys(filter(None, (name.strip() for name in policies.split(",")))))
    for name in names:
        TreeSettings(policy=name)  # an unknown one is named now
    if check:
        _refuse_with_check(click.get_current_context(), form)
    rows = read_prompts(prompts, form=input_form, say=console.say) if prompts else None

    import_engine(console)
    from edgespec.doctor.benchmark import compare_modes
    from edgespec.pair.pair import DEMO_FOLDER
    from edgespec.placement.pair_sizes import PairSizes
    from edgespec.text.bias import with_token_ids

    pair = open_pair_with_draft(models, "grow trees with")
    sampling = with_token_ids(replace(pair.default_sampling(), **chosen), pair)
    rows = rows or read_prompts(str(DEMO_FOLDER / "prompts.jsonl"))
    rows = rows[:limit]
    say_unused_keys(console, rows, applies=False)
    encoded = encode_prompts(pair, rows, raw=raw or prompts is None)
    run_config = _run_config(pair, machine, max(map(len, encoded)), max_new_tokens)
    sizes = PairSizes(pair, run_config)
    setup = _set_up(console, sizes, run_config, trees, sampling)
    num_alone = _layers_without_draft(sizes, setup)
    with open_engine(console, setup, machine) as engine:
        with console.progress_bar() as bar:
            if check:
                options: TextOptions = {"max_new_tokens": max_new_tokens, "sampling": sampling, "seed": seed}
                return _check(console, engine, encoded, options, as_json=as_json or form in {"json", "jsonl"})
            rounds = compare_modes(
                engine,
                encoded,
                policies=names,
                options={"max_new_tokens": max_new_tokens, "sampling": sampling, "seed": seed},
                repeats=repeats,
                progress=console.counting(bar, "decoding", "texts"),
            )
        write_report(engine, rounds, sampling, form="json" if as_json else form)
        _report_better_choices(console, engine, rounds, num_alone=num_alone)
    return 0


def _refuse_with_check(context: click.Context, form: str) -> None:
    """Raise click.UsageError for options that mean nothing to --check."""
    for option in context.command.params:
        is_given = context.get_parameter_source(str(option.name)) is ParameterSource.COMMANDLINE
        if is_given and option.name in {"repeats", "policies"}:
            raise click.UsageError(f"--{option.name} does not go with --check: nothing is timed.")
    if form == "csv":
        raise click.UsageError("-o csv does not go with --check: use md or json.")


def _run_config(pair: ModelPair, machine: MachineOptions, longest: int, max_new_tokens: int) -> RunConfig:
    """With room for the longest prompt and its new tokens; raises EdgespecError where the context has none."""
    context_tokens = machine.ctx_size or longest + max_new_tokens
    most = min(context_tokens, pair.max_context or context_tokens)
    if longest + max_new_tokens > most:
        raise EdgespecError(
            "E_CONTEXT",
            f"the longest prompt has {longest} tokens, with {max_new_tokens} new ones more than the context of {most}.",
            "Shorten the prompts, or lower -n.",
        )
    return machine.run_config(pair, context_tokens=context_tokens, prompt_tokens=longest)


def _set_up(
    console: Console, sizes: PairSizes, run_config: RunConfig, trees: TreeOptions, sampling: SamplingSettings
) -> PairSetup:
    """The pair with trees to measure: where its profile's plan is to grow none, the next best that it knows."""
    from edgespec.placement.pair_profile import tree_settings
    from edgespec.placement.pair_setup import set_up, set_up_by_profile

    setup = set_up_by_profile(
        sizes.pair, run_config, source=trees.profile, given=trees.given, temperature=sampling.temperature, sizes=sizes
    )
    if setup.tree.policy != "none":
        return setup
    assert setup.plan is not None
    tree = tree_settings(replace(setup.plan.best, pays=True))
    console.say(f"the profile's plan is plain decoding; measured against it: {tree.policy} trees")
    return set_up(sizes.pair, run_config, tree, profile=setup.profile, sizes=sizes)


def _layers_without_draft(sizes: PairSizes, setup: PairSetup) -> int:
    """Return how many layers could stay resident beside prompts as long as the context, with no draft in memory."""
    run_config = replace(setup.run_config, prompt_tokens=setup.run_config.context_tokens)
    return sizes.place(setup.tree.plain(), run_config).placement.num_resident


def _report_better_choices(console: Console, engine: Engine, rounds: dict[str, list[Round]], *, num_alone: int) -> None:
    """What the table does not show: that plain decoding is the better choice, or would have had more memory."""
    medians = {mode: statistics.median(found.tokens_per_s for found in own) for mode, own in rounds.items()}
    if medians["tree"] < medians["plain"]:
        console.say("trees are slower than plain decoding here; edgespec profile finds settings that are not, or none")
    if num_alone > engine.placement.num_resident:
        console.say(
            f"without the draft in memory, {num_alone} layers instead of {engine.placement.num_resident} could stay "
            "resident: plain decoding by itself is faster than here"
        )


def _check(console: Console, engine: Engine, encoded: list[list[int]], options: TextOptions, *, as_json: bool) -> int:
    """Compare the texts of both modes and return the exit status."""
    from edgespec.cli.bench.report import write_verdicts

    sampling = options["sampling"]
    if engine.policy.draw != "coupled" and sampling is not None and sampling.temperature > 0:
        console.say(
            f"texts of {engine.policy.draw} children cannot be compared at temperature {sampling.temperature:g}: "
            "they are other draws of the same distribution; compared at temperature 0"
        )
    verdicts: list[Verdict] = []
    for number, ids in enumerate(encoded, start=1):
        verdicts += engine.verify_lossless([ids], **options)
        console.say_sometimes(f"checking: {number} of {len(encoded)} texts")
    write_verdicts(engine, verdicts, as_json=as_json)
    return 0 if all(verdict.is_lossless for verdict in verdicts) else EXIT_RUNTIME
