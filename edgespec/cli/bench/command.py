"""`edgespec bench`: plain decoding against trees on the same prompts, and whether their texts are equal."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from edgespec.cli.bench.report import FORMATS, write_report, write_verdicts
from edgespec.cli.console import Console
from edgespec.cli.ctrl_c import import_engine
from edgespec.cli.open_engine import open_engine
from edgespec.cli.open_pair import open_pair_with_draft
from edgespec.cli.options.console import console_options
from edgespec.cli.options.distribution import RAW_HELP, DistributionOptions
from edgespec.cli.options.machine import MachineOptions, machine_options
from edgespec.cli.options.model import ModelOptions, adapted_options_with_target
from edgespec.cli.options.numbers import WholeRange
from edgespec.cli.options.prompts import InputOptions
from edgespec.cli.options.record import group, option, options_of
from edgespec.cli.options.tree import tree_options
from edgespec.cli.prompts.read import encode_prompts, read_prompts
from edgespec.cli.prompts.report import say_unused_keys
from edgespec.errors import EXIT_RUNTIME, EdgespecError
from edgespec.tree.settings import TreeOptions, TreeSettings

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

JSON_FORMATS = ("json", "jsonl")
PROMPTS_HELP = "Continue these texts, as for `edgespec generate`; of turns, the first. [default: six pieces of Python]"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions(InputOptions):
    """What to decode, how, and how to report it."""

    prompts: str | None = option("--prompts", help=PROMPTS_HELP)
    raw: bool = option("--raw", "--ignore-chat-template", is_flag=True, help=RAW_HELP)
    limit: int | None = option("--limit", type=WholeRange(1), help="Decode at most this many of the prompts.")
    repeats: int = option(
        "-r", "--repeats", type=WholeRange(1), default=5, show_default=True, help="Decode all prompts this many times."
    )
    max_new_tokens: int = option(
        "-n", "--max-new-tokens", type=WholeRange(2), default=64, show_default=True, help="Make every text this long."
    )
    sampling: DistributionOptions = group(DistributionOptions)
    seed: int = option("--seed", type=WholeRange(0), default=0, show_default=True, help="Draw with this seed.")
    policies: str = option("--policies", default="", help="Compare trees of these policies too, as opt-tree,eagle2.")
    check: bool = option(
        "--check", is_flag=True, help="Compare texts instead of timing them; exit code 1 when they differ."
    )
    report_format: str = option(
        "-o", "--format", type=click.Choice(FORMATS), default="md", show_default=True, help="Write the report so."
    )
    as_json: bool = option("--json", is_flag=True, help="Write -o json.")

    @property
    def written_format(self) -> str:
        """One of `report.FORMATS`."""
        return "json" if self.as_json else self.report_format


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
@adapted_options_with_target
@options_of(BenchOptions, handed_on_as="options")
@tree_options
@machine_options
@console_options()
def command(
    *, models: ModelOptions, options: BenchOptions, trees: TreeOptions, machine: MachineOptions, console: Console
) -> int:
    """Compare trees with plain decoding.

    The same prompts are decoded plainly and through trees, in turn, and tokens a second compared. With
    --check, texts through trees must equal plain decoding's of the same seed, and each token must be the
    target's own when the text is read again; near ties are told apart.
    """
    if trees.settings.policy == "none":
        raise EdgespecError("E_SETTING", "--policy none leaves nothing to compare.", "Leave it out, or name a policy.")
    if not trees.settings.is_lossless and options.check:
        raise EdgespecError("E_SETTING", "--target-width above 1 is lossy.", "Leave it out with --check.")
    names = list(dict.fromkeys(filter(None, (name.strip() for name in options.policies.split(",")))))
    for name in names:
        TreeSettings(policy=name)  # an unknown one is named now
    if options.check:
        _refuse_with_check(click.get_current_context(), options.report_format)
    rows = (
        read_prompts(options.prompts, input_format=options.source_format, say=console.say) if options.prompts else None
    )

    import_engine(console)
    from edgespec.doctor.benchmark import compare_modes
    from edgespec.pair.pair import DEMO_FOLDER
    from edgespec.pair.tree_support import followed_trees
    from edgespec.placement.pair_sizes import PairSizes

    pair = open_pair_with_draft(models, "grow trees with")
    for name in names:
        # What the target cannot follow is refused now.
        followed_trees(pair.target, TreeSettings(policy=name), keeps_row_bits=False)
    sampling = options.sampling.sampling_of(pair)
    rows = rows or read_prompts(str(DEMO_FOLDER / "prompts.jsonl"))
    rows = rows[: options.limit]
    say_unused_keys(console, rows, applies=False)
    encoded = encode_prompts(pair, rows, raw=options.raw or options.prompts is None)
    run_config = _run_config(pair, machine, max(map(len, encoded)), options.max_new_tokens)
    sizes = PairSizes(pair, run_config)
    setup = _set_up(console, sizes, run_config, trees, sampling)
    num_alone = _layers_without_draft(sizes, setup)
    text_options: TextOptions = {
        "max_new_tokens": options.max_new_tokens, "sampling": sampling, "seed": options.seed
    }  # fmt: skip
    with open_engine(console, setup, machine) as engine:
        with console.progress_bar() as bar:
            if options.check:
                return _check(console, engine, encoded, text_options, as_json=options.written_format in JSON_FORMATS)
            rounds = compare_modes(
                engine,
                encoded,
                policies=names,
                options=text_options,
                repeats=options.repeats,
                progress=console.counting(bar, "decoding", "texts"),
            )
        write_report(engine, rounds, sampling, report_format=options.written_format)
        _report_better_choices(console, engine, rounds, num_alone=num_alone)
    return 0


def _refuse_with_check(context: click.Context, report_format: str) -> None:
    """Raise click.UsageError for options that mean nothing to --check."""
    for parameter in context.command.params:
        is_given = context.get_parameter_source(str(parameter.name)) is ParameterSource.COMMANDLINE
        if is_given and parameter.name in {"repeats", "policies"}:
            raise click.UsageError(f"--{parameter.name} does not go with --check: nothing is timed.")
    if report_format == "csv":
        raise click.UsageError("-o csv does not go with --check: use md or json.")


def _run_config(pair: ModelPair, machine: MachineOptions, longest: int, max_new_tokens: int) -> RunConfig:
    """Return the place for the longest prompt and its new tokens; raises EdgespecError where it does not fit."""
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
    from edgespec.placement.pair_setup import set_up, set_up_by_profile
    from edgespec.placement.profile_trees import tree_settings

    setup = set_up_by_profile(sizes.pair, run_config, trees, temperature=sampling.temperature, sizes=sizes)
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
