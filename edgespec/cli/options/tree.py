"""The options that shape token trees, and where their settings come from."""

import re
from dataclasses import dataclass, fields
from pathlib import Path

import click
from click.core import ParameterSource

from edgespec.cli.options.numbers import NumberOrAuto, WholeNumber
from edgespec.cli.options.record import FOLDER, option, options_of
from edgespec.config import MAX_TREE_SIZE
from edgespec.tree.policies import POLICIES, policy_named, users_of
from edgespec.tree.settings import DEFAULT_DRAFT_TOKENS, TreeOptions, TreeSettings
from edgespec.tree.shapes import PRESETS

TREE = TreeSettings()
SIZE_HELP = f"Grow at most this many nodes a tree, 1 to {MAX_TREE_SIZE}. [auto: as many as pay]"
WIDTH_HELP = (
    "Give a node at most this many children; eagle2: also a layer; c2t: a layer. [16; eagle2 10, c2t 15, opt-tree all]"
)
DRAW_HELP = "Choose how children come about. [coupled; dyspec, sequoia, specinfer, mcsd: sampled]"
PRESET_HELP = f"{', '.join(PRESETS)}, or a JSON file of paths of ranks or parents"
TEMPERATURE_HELP = (
    "Set the draft's temperature. [default: 0.85 of the target's (coupled), the target's (sampled, chosen), by policy "
    "if that is greedy]"
)
LOOKUP_HELP = (
    "Let trees have what followed in the text, or in --corpus, before; alone where there is no draft. [default: on, "
    "except for sampled and chosen children above temperature 0]"
)
PROFILE_HELP = (
    "Begin trees where `edgespec profile` measured that it pays. A FILE holds them to its plan, as single flags do."
)


def _on_or_off(_context: click.Context, _parameter: click.Parameter, value: str | None) -> bool | None:
    return None if value is None else value == "on"


def _numbers(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not re.fullmatch(r"\d{1,4}(,\d{1,4})*", value):
        raise click.BadParameter(f"'{value}' is not a list of numbers, such as 4,2,2,1.")
    return tuple(map(int, value.split(",")))


def _fork(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[int, int] | None:
    if value is None:
        return None
    match = re.fullmatch(r"(\d{1,4})x(\d{1,4})", value)
    if not match:
        raise click.BadParameter(f"'{value}' is not chains x length, such as 16x5.")
    return int(match[1]), int(match[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeFlags:
    """The flags of `TreeSettings`; None is not given."""

    policy: str | None = option(
        "--policy", help=f"Grow trees in this way: {', '.join(POLICIES)}. [default: {TREE.policy}]"
    )
    draw: str | None = option("--draw", metavar="coupled|sampled|chosen", help=DRAW_HELP)
    size: int | None = option("--tree-size", type=NumberOrAuto("nodes"), metavar="N|auto", help=SIZE_HELP)
    depth: int | None = option(
        "--tree-depth", type=WholeNumber(), help=f"Grow at most this many layers a tree. [default: {TREE.depth}]"
    )
    max_children: int | None = option("--tree-width", type=WholeNumber(), help=WIDTH_HELP)
    threshold: float | None = option(
        "--tree-threshold", type=float,
        help=f"Grow nodes of at least this expected value ({users_of('threshold')}). [default: 0, off]",
    )  # fmt: skip
    branching: tuple[int, ...] | None = option(
        "--branching", callback=_numbers, metavar="4,2,2,1",
        help=f"Give every node this many children, by layer ({users_of('branching')}).",
    )  # fmt: skip
    fork: tuple[int, int] | None = option(
        "--fork", callback=_fork, metavar="WxD", help=f"Grow W chains of D tokens ({users_of('fork')})."
    )
    draft_tokens: int | None = option(
        "--draft-tokens", "--num-draft-tokens", type=WholeNumber(),
        help=f"Draft a chain of this length ({users_of('draft_tokens')}). [default: {DEFAULT_DRAFT_TOKENS}]",
    )  # fmt: skip
    tree_file: Path | None = option(
        "--tree-file", type=FOLDER, help=f"Use this preset tree ({users_of('tree_file')}): {PRESET_HELP}."
    )
    stop_gain: float | None = option(
        "--stop-gain", type=float, help=f"Stop when a layer adds fewer expected tokens ({users_of('stop_gain')})."
    )
    stop_depths: tuple[int, ...] | None = option(
        "--stop-depths", callback=_numbers, metavar="4,6,8",
        help=f"Look at these depths whether to stop ({users_of('stop_depths')}).",
    )  # fmt: skip
    stop_log_probability: float | None = option(
        "--stop-logprob", type=float,
        help=f"Stop there below this log-probability. [default: {TREE.stop_log_probability}]",
    )  # fmt: skip
    classifier: Path | None = option(
        "--classifier", type=FOLDER,
        help=f"Use this classifier of C2T ({users_of('classifier')}). [c2t: the built-in pair's]",
    )  # fmt: skip
    stop_model: Path | None = option(
        "--stop-model", type=FOLDER, help="Use this decision model, which ends drafting early (static trees)."
    )
    confidence: float | None = option(
        "--confidence", type=float, help="Set the least confidence of classifier (0.5) or model (0.4)."
    )
    acceptance: Path | None = option(
        "--acceptance", type=FOLDER,
        help=f"Use this measured acceptance ({users_of('acceptance')}). [default: the built-in pair's]",
    )  # fmt: skip
    target_width: int | None = option(
        "--target-width", type=WholeNumber(),
        help="Let the target start this many branches and take the longest: LOSSY above 1 "
        f"({users_of('target_width')}).",
    )  # fmt: skip
    draft_temperature: float | None = option("--draft-temp", type=float, help=TEMPERATURE_HELP)
    lookup: bool | None = option(
        "--lookup", type=click.Choice(["on", "off"]), callback=_on_or_off, metavar="on|off", help=LOOKUP_HELP
    )


TREE_FIELDS = [field.name for field in fields(TreeFlags)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileTreeFlags(TreeFlags):
    """The same, where trees may begin at a profile's plan."""

    profile: str = option("--profile", default="auto", show_default=True, metavar="auto|none|FILE", help=PROFILE_HELP)


def make_tree_options(flags: TreeFlags) -> TreeOptions:
    """Return what flags say of trees; raises EdgespecError for one that the policy does not use."""
    explicit = {name: value for name in TREE_FIELDS if (value := getattr(flags, name)) is not None}
    policy = policy_named(explicit.get("policy", TREE.policy))
    context = click.get_current_context()
    # A default of the user's own is for the policies that it means something to.
    explicit = {
        name: value
        for name, value in explicit.items()
        if policy.uses(name) or context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    return TreeOptions(explicit=explicit, profile=flags.profile if isinstance(flags, ProfileTreeFlags) else "none")


tree_options = options_of(ProfileTreeFlags, handed_on_as="trees", made=make_tree_options)
