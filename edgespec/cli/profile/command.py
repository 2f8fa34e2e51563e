"""`edgespec profile`: measure this machine and a pair, and keep the best settings for later runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.console import Console, write_lines
from edgespec.cli.ctrl_c import import_engine
from edgespec.cli.open_engine import open_engine
from edgespec.cli.open_pair import open_pair_with_draft
from edgespec.cli.options.console import console_options
from edgespec.cli.options.distribution import parse_temperatures
from edgespec.cli.options.machine import MachineOptions, machine_options
from edgespec.cli.options.model import ModelOptions, adapted_options_with_target
from edgespec.cli.options.numbers import WholeRange
from edgespec.cli.options.prompts import InputOptions
from edgespec.cli.options.record import FOLDER, option, options_of
from edgespec.cli.prompts.read import encode_prompts, read_prompts
from edgespec.cli.prompts.report import say_unused_keys
from edgespec.errors import EdgespecError, profile_errors
from edgespec.user_paths import profiles_folder, require_place, shown_place

if TYPE_CHECKING:
    from profiles.schema import Profile

MAX_PROMPT_TOKENS = 512  # of a prompt, its end: longer ones take their time in every stage
MIN_PROMPT_TOKENS = 16  # that a model of few positions is still given
PROMPTS_HELP = (
    "Measure on texts like those it will be used for, as for `edgespec generate`. [default: six pieces of Python]"
)
EFFORT_HELP = (
    "Take minutes, for more texts and an acceptance model of the pair's own, or about a minute for the built-in pair. "
    "[default: quick]"
)
TEMPERATURES_HELP = "Plan for these temperatures, as 0,0.6,1. [0, 1 and the model's own, or 0.6]"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions(InputOptions):
    """What to measure, or which profile to copy."""

    full: bool = option("--full/--quick", help=EFFORT_HELP)
    prompts: str | None = option("--prompts", help=PROMPTS_HELP)
    temps: str | None = option("--temps", help=TEMPERATURES_HELP)
    seed: int = option("--seed", type=WholeRange(0), default=0, show_default=True, help="Draw with this seed.")
    plot: Path | None = option(
        "--plot", type=FOLDER, help="Draw costs and speeds to FILE.png or .svg (needs edgespec[plot])."
    )
    lists: bool = option("--list", is_flag=True, help="Show the profiles that there are, and measure nothing.")
    export: Path | None = option(
        "--export", type=FOLDER, help="Copy the pair's kept profile to this file, and measure nothing."
    )
    imported: Path | None = option(
        "--import", type=FOLDER, help="Keep a file's profile of the pair, and measure nothing."
    )
    overwrite: bool = option("--overwrite", is_flag=True, help="Let --export and --import replace what is there.")
    as_json: bool = option("--json", is_flag=True, help="Write the profile as JSON to stdout.")

    def __post_init__(self) -> None:
        InputOptions.__post_init__(self)
        if self.lists:
            return
        copies = self.export is not None or self.imported is not None
        if copies and ((self.export and self.imported) or self.full or self.prompts or self.temps):
            raise click.UsageError(
                "--export and --import go alone: nothing is measured, so leave out --full, --prompts, --temps."
            )
        if self.overwrite and not copies:
            raise click.UsageError("--overwrite belongs to --export and --import.")


@click.command(
    name="profile",
    epilog="""\b
Examples:
  edgespec profile                                 the built-in pair, about a minute
  edgespec profile TARGET -md DRAFT --full --prompts prompts.jsonl
  edgespec profile TARGET -md DRAFT --max-cpu-mem 24GiB --plot profile.png
  edgespec profile TARGET -md DRAFT --export pair.toml
  edgespec profile --list

The same model, memory and number format options as for the runs that
are to use it. Runs find it by themselves: --profile auto is the default.
""",
)
@adapted_options_with_target
@options_of(ProfileOptions, handed_on_as="options")
@machine_options
@console_options()
def command(*, models: ModelOptions, options: ProfileOptions, machine: MachineOptions, console: Console) -> int:
    """Measure once, then always run at the best setting.

    Decodes the prompts with trees that tune themselves, of one text and of several at once, and keeps what they have
    learned at each temperature. Later runs begin there. Speculation that is slower than plain decoding is switched off.
    """
    if options.plot is not None:
        _check_plot(options.plot)
    if options.lists:
        return _list()
    if options.export is not None or options.imported is not None:
        import_engine(console)
        from edgespec.cli.profile.exchange import export_profile, import_profile

        if options.imported is not None:
            require_place(profiles_folder())
            profile, outcome = import_profile(console, models, machine, options.imported, overwrite=options.overwrite)
        else:
            assert options.export is not None
            profile, outcome = export_profile(models, machine, options.export, overwrite=options.overwrite)
    else:
        profile = _measure(console, models, machine, options)
        outcome = f"kept as {_keep(profile)}"
    _show(profile, options.plot, as_json=options.as_json)
    console.say(outcome, breaks=False)  # its path is to be copied
    return 0


def _keep(profile: Profile) -> Path:
    from profiles.files import write_profile

    own_path = profiles_folder() / f"{profile.name}.toml"
    with profile_errors():
        write_profile(profile, own_path)
    return own_path


def _measure(console: Console, models: ModelOptions, machine: MachineOptions, options: ProfileOptions) -> Profile:
    """Load the pair and measure it."""
    temperatures = parse_temperatures(options.temps) if options.temps else None
    rows = (
        read_prompts(options.prompts, input_format=options.source_format, say=console.say) if options.prompts else None
    )
    say_unused_keys(console, rows or (), applies=False)
    require_place(profiles_folder())
    import_engine(console)
    from edgespec.doctor.profile_pair import FULL, NEW_TOKENS, QUICK, ProfileRun, profile_pair, set_up_to_measure
    from edgespec.machine.cpu import read_cpu
    from edgespec.pair.pair import DEMO_FOLDER
    from edgespec.tuning.threads import OthersLoad

    pair = open_pair_with_draft(models, "profile the target with")
    encoded = encode_prompts(pair, rows or read_prompts(str(DEMO_FOLDER / "prompts.jsonl")), raw=True)
    most = MAX_PROMPT_TOKENS + NEW_TOKENS
    left = min(limit or most for limit in (pair.max_context, pair.draft and pair.draft.max_context)) - NEW_TOKENS
    encoded = [ids[-min(MAX_PROMPT_TOKENS, max(MIN_PROMPT_TOKENS, left)) :] for ids in encoded]
    longest = max(map(len, encoded))
    run_config = machine.run_config(
        pair, context_tokens=machine.ctx_size or longest + NEW_TOKENS, prompt_tokens=longest
    )
    setup = set_up_to_measure(pair, run_config, num_prompts=len(encoded), keeps_draft_probs=options.full)
    with open_engine(console, setup, machine) as engine, console.progress_bar() as bar:
        run = ProfileRun(
            engine=engine,
            prompts=encoded,
            temperatures=temperatures or sorted({0.0, pair.default_sampling().temperature or 0.6, 1.0}),
            effort=FULL if options.full else QUICK,
            seed=options.seed,
            report=_progress(console, bar),
        )
        others = OthersLoad(read_cpu().allowed)
        profile = profile_pair(run)
        _say_busy(console, others() or 0.0)
        if options.full and profile.acceptance is None:
            console.say("no acceptance model of the pair's own: these prompts give too few trees; give more of them")
    return profile


def _say_busy(console: Console, busy: float) -> None:
    """Say that other programs kept so many processors busy, where that has changed what was measured."""
    from edgespec.doctor.machine_speed import MAX_BUSY

    if busy >= MAX_BUSY:
        console.say(
            f"other programs kept {busy:.1f} processors busy while this was measured; measure again when those have "
            "ended"
        )


def _progress(console: Console, bar: Any) -> Callable[[str, float], None]:
    tasks: dict[str, Any] = {}

    def update(stage: str, share: float) -> None:
        console.say_sometimes(f"{stage}: {share:.0%}")
        if bar is None:
            return
        if stage not in tasks:
            for task in tasks.values():
                bar.update(task, visible=False)
            tasks[stage] = bar.add_task(stage, total=1.0, note="")
        bar.update(tasks[stage], completed=share, note=f"{share:.0%}")

    return update


def _show(profile: Profile, plot: Path | None, *, as_json: bool) -> None:
    from edgespec.cli.profile.report import write_report

    if as_json:
        sys.stdout.write(json.dumps(asdict(profile)) + "\n")
    else:
        write_report(profile)
    if plot is not None:
        from edgespec.cli.profile.plot import draw_profile

        draw_profile(profile, plot)


def _list() -> int:
    from edgespec.cli.profile.report import describe
    from profiles.errors import ProfileError
    from profiles.files import all_profiles

    found = list(all_profiles(profiles_folder()))
    for path, profile in found:
        if isinstance(profile, ProfileError):
            write_lines(f"{path}: {profile.what}")
            continue
        plans = ", ".join(
            f"T={plan.temperature:g} {describe(plan.best)} {plan.best.tokens_per_s:.3g} tok/s" for plan in profile.plans
        )
        pair = profile.pair
        write_lines(f"{profile.name}  {pair.target} + {pair.draft}, {profile.created}: {plans}")
    if not found:
        write_lines(f"no profiles in {shown_place(profiles_folder())}")
    return 0


def _check_plot(path: Path) -> None:
    """Refuse now a plot that could not be drawn after minutes of measuring."""
    import importlib.util

    if path.suffix not in {".png", ".svg"}:
        raise EdgespecError("E_OUTPUT", f"'{path}' is neither .png nor .svg.", "Name the plot FILE.png or FILE.svg.")
    if not path.absolute().parent.is_dir():
        raise EdgespecError("E_OUTPUT", f"there is no folder '{path.parent}' to write in.", "Make it first.")
    if importlib.util.find_spec("matplotlib") is None:
        raise EdgespecError("E_SETTING", "--plot needs matplotlib.", "Install it: pip install 'edgespec[plot]'.")
