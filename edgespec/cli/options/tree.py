"""The options that shape token trees, and where their settings come from."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import click
from click.core import ParameterSource

from edgespec.cli.options.group import FOLDER, Command, with_options
from edgespec.cli.options.numbers import WholeNumber, is_auto, without_fraction
from edgespec.config import MAX_TREE_SIZE
from edgespec.tree.policies import POLICIES, policy_named, users_of
from edgespec.tree.settings import DEFAULT_DRAFT_TOKENS, TreeSettings, refuse_unused
from edgespec.tree.shapes import PRESETS

TREE = TreeSettings()
# All but what training alone asks for.
TREE_FIELDS = [field.name for field in dataclasses.fields(TreeSettings) if field.name != "reranked"]
SIZE_HELP = f"Most nodes of a tree, 1 to {MAX_TREE_SIZE}. [auto: as many as pay]"
WIDTH_HELP = "Most children of a node; eagle2: also of a layer; c2t: of a layer. [16; eagle2 10, c2t 15, opt-tree all]"
DRAW_HELP = "How children come about. [coupled; dyspec, sequoia, specinfer, mcsd: sampled]"
PROFILE_HELP = "Where trees begin: what `edgespec profile` measured. A FILE holds them to its plan, as single flags do."


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeOptions:
    """What a command line says of trees."""

    settings: TreeSettings
    given: Mapping[str, Any]  # what it sets itself, by the names of `TreeSettings`
    profile: str = "none"  # auto, none, or a file


def tree_options(*, has_profile: bool) -> Callable[[Command], Command]:
    """Add the options of the trees' shape, with --profile where that may come from one; handed on as `trees`."""

    def decorate(function: Command) -> Command:
        @functools.wraps(function)
        def call(*, profile: str = "none", **values: Any) -> Any:
            given = {name: values.pop(name) for name in TREE_FIELDS}
            given = {name: value for name, value in given.items() if value is not None}
            policy = policy_named(given.get("policy", TREE.policy))
            context = click.get_current_context()
            for name in [name for name in given if not policy.uses(name)]:
                if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
                    refuse_unused(name, policy.name)
                # A default of the user's own is for the policies that it means something to.
                del given[name]
            return function(trees=TreeOptions(settings=TreeSettings(**given), given=given, profile=profile), **values)

        return with_options(call, [*_SHAPE_OPTIONS, *([_PROFILE_OPTION] if has_profile else [])])

    return decorate


def _tree_size(_context: click.Context, _parameter: click.Parameter, value: str | None) -> int | None:
    if value is None or is_auto(value):
        return None
    if not without_fraction(value).isdecimal():
        raise click.BadParameter(f"'{value}' is not auto or a number of nodes.")
    return int(without_fraction(value))


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


def _users(setting: str) -> str:
    return ", ".join(users_of(setting))


_PROFILE_OPTION = click.option(
    "--profile", default="auto", show_default=True, metavar="auto|none|FILE", help=PROFILE_HELP
)
_SHAPE_OPTIONS: list[Callable[[Command], Command]] = [
    click.option("--policy", help=f"How trees grow: {', '.join(POLICIES)}. [default: {TREE.policy}]"),
    click.option("--draw", metavar="coupled|sampled|chosen", help=DRAW_HELP),
    click.option("--tree-size", "size", callback=_tree_size, metavar="N|auto", help=SIZE_HELP),
    click.option("--tree-depth", "depth", type=WholeNumber(), help=f"Most layers of a tree. [default: {TREE.depth}]"),
    click.option("--tree-width", "max_children", type=WholeNumber(), help=WIDTH_HELP),
    click.option("--tree-threshold", "threshold", type=float,
                 help=f"Least expected value of a node ({_users('threshold')}). [default: 0, off]"),
    click.option("--branching", callback=_numbers, metavar="4,2,2,1",
                 help=f"Children of every node, by layer ({_users('branching')})."),
    click.option("--fork", callback=_fork, metavar="WxD", help=f"W chains of D tokens ({_users('fork')})."),
    click.option("--draft-tokens", "--num-draft-tokens", "draft_tokens", type=WholeNumber(),
                 help=f"Length of a chain ({_users('draft_tokens')}). [default: {DEFAULT_DRAFT_TOKENS}]"),
    click.option("--tree-file", type=FOLDER,
                 help=f"A preset tree ({_users('tree_file')}): {', '.join(PRESETS)}, or a JSON file of paths of ranks "
                      "or parents."),
    click.option("--stop-gain", type=float,
                 help=f"Stop when a layer adds fewer expected tokens ({_users('stop_gain')})."),
    click.option("--stop-depths", callback=_numbers, metavar="4,6,8",
                 help=f"Depths at which to look whether to stop ({_users('stop_depths')})."),
    click.option("--stop-logprob", "stop_log_probability", type=float,
                 help=f"Stop there below this log-probability. [default: {TREE.stop_log_probability}]"),
    click.option("--classifier", type=FOLDER,
                 help=f"C2T's classifier ({_users('classifier')}). [c2t: the built-in pair's]"),
    click.option("--stop-model", type=FOLDER, help="A decision model that ends drafting early (static trees)."),
    click.option("--confidence", type=float, help="Least confidence of classifier (0.5) or model (0.4)."),
    click.option("--acceptance", type=FOLDER,
                 help=f"Measured acceptance ({_users('acceptance')}). [default: the built-in pair's]"),
    click.option("--target-width", type=WholeNumber(),
                 help="LOSSY above 1: the target starts so many branches, the longest wins "
                      f"({_users('target_width')})."),
    click.option("--draft-temp", "draft_temperature", type=float,
                 help="Of the draft. [default: 0.85 of the target's (coupled), the target's (sampled, chosen), "
                 "by policy if that is greedy]"),
]  # fmt: skip
