"""A pair is set up: its trees are chosen, the texts that share a pass are counted, and its weights are placed.

All of it is planned in one reading of the memory, with one skeleton of each model: `PairSizes` has both. A run's
`Workload`, the user's trees and a profile go in, and a `PairSetup` comes out, which is all that loading takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from edgespec.errors import EdgespecError
from edgespec.inputs import checked
from edgespec.measured import with_best_limits, with_stop_gain
from edgespec.pair.pair import ModelPair
from edgespec.placement.largest_tree import LargestTree
from edgespec.placement.pair_profile import (
    FactsWith,
    FoundProfile,
    find_pair_profile,
    pair_facts,
    read_kept_profile,
    tree_settings,
    weights_by_use,
)
from edgespec.placement.pair_sizes import PairSizes
from edgespec.placement.parallel import PassShares, Workload, pass_shares, with_workload
from edgespec.placement.place import PlacedWeights
from edgespec.placement.run_config import RunConfig
from edgespec.tree.settings import TreeSettings
from edgespec.tuning.memory import plan_at, plan_for_texts
from offload.placement import Placement
from profiles.schema import PairFacts, Profile, TemperaturePlan

# Tree settings that leave the size to be tuned
SAY_NO_SIZE = {"policy", "draw", "max_children", "acceptance", "classifier", "draft_temperature"}
STREAMED_SLACK = 0.03  # more bytes a pass, so that trees may be larger


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSetup:
    """A pair with its trees chosen and its weights placed, which is all that loading it takes."""

    pair: ModelPair
    run_config: RunConfig
    tree: TreeSettings
    largest_tree: TreeSettings  # the largest trees that memory is planned for
    weights: PlacedWeights
    is_tuned: bool = False  # whether trees change as they pay, up to `largest_tree`
    profile: Profile | None = None
    plan: TemperaturePlan | None = None  # of the profile, that the trees follow
    differences: tuple[str, ...] = ()  # from what the profile was measured with, each with both values
    notes: tuple[str, ...] = ()  # for people: why a profile is not used, or what to know of the one that is

    @property
    def placement(self) -> Placement:
        """The placement of the target's layers."""
        return self.weights.placement

    @property
    def predicted_per_s(self) -> float | None:
        """The tokens a second that the plan promises; None where it is not followed to the letter, or was measured
        with anything else.
        """
        if self.plan is None or self.differences:
            return None
        plan = plan_for_texts(self.plan, self.run_config.num_texts)
        is_followed = plan.num_texts == self.run_config.num_texts and self.tree == tree_settings(plan)
        return plan.tokens_per_s if is_followed else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _TreeRequest:
    """The trees that the user gave, setting by setting, and what a profile's plan is chosen for."""

    given: Mapping[str, Any]
    tree: TreeSettings  # the same with all defaults
    is_tuned: bool
    temperature: float
    workload: Workload | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _TreesWithNotes:
    """Trees, and what a person should know of them."""

    tree: TreeSettings
    notes: tuple[str, ...] = ()


def set_up(
    pair: ModelPair,
    run_config: RunConfig,
    tree: TreeSettings | None = None,
    *,
    is_tuned: bool | None = None,
    profile: Profile | None = None,
    sizes: PairSizes | None = None,
) -> PairSetup:
    """Set the pair up with these trees, or with trees that tune themselves.

    Plain decoding leaves the draft out. `is_tuned` lets given trees be the first of those that tune themselves.
    `sizes` are those that another plan of this pair has read. Raises EdgespecError where the pair does not fit.
    """
    tree = checked("tree", tree, TreeSettings | None)
    is_tuned = tree is None if is_tuned is None else is_tuned
    tree = tree or TreeSettings()
    if pair.draft is None or tree.policy == "none":
        tree, is_tuned = tree.plain(), False
    sizes = sizes or PairSizes(pair, run_config)
    notes = sizes.notes(tree, run_config)
    if is_tuned:
        largest = sizes.largest(tree, run_config, slack=STREAMED_SLACK)
        tree = tree.within(largest.tree)
    else:
        largest = LargestTree(tree=tree, weights=sizes.place(tree, run_config))
    return PairSetup(
        pair=pair, run_config=run_config, tree=tree, largest_tree=largest.tree, weights=largest.weights,
        is_tuned=is_tuned, profile=profile, notes=notes,
    )  # fmt: skip


def set_up_by_profile(
    pair: ModelPair,
    run_config: RunConfig,
    *,
    source: str,
    given: Mapping[str, Any],
    temperature: float,
    workload: Workload | None = None,
    sizes: PairSizes | None = None,
) -> PairSetup:
    """Set the pair up with the trees that the user gave, over the profile's plan, over the defaults.

    The plan is the profile's for this temperature. `source` is auto (the profile that was measured here for this pair,
    if any), none, or a profile's file. A profile is matched against the placement that its trees have for one text;
    `workload` then says how many texts are under way, in place of `run_config`. Raises EdgespecError for a file that
    cannot be used, and where the pair does not fit.
    """
    source, tree = checked("profile", source, str), TreeSettings(**given)
    if pair.draft is None:
        tree = tree.plain()
    sizes = sizes or PairSizes(pair, run_config)
    is_tuned = source in ("auto", "none") and tree.policy != "none" and given.keys() <= SAY_NO_SIZE
    request = _TreeRequest(given=given, tree=tree, is_tuned=is_tuned, temperature=temperature, workload=workload)
    found = FoundProfile()
    if source != "none" and tree.policy != "none":
        found = find_pair_profile(source, pair, run_config.device, _facts_with(sizes, run_config, request))
    if found.profile is not None:
        return _set_up_by_plan(sizes, run_config, request, found, found.profile)
    run_config = _with_texts(sizes, run_config, request, PassShares())
    setup = set_up(pair, run_config, tree, is_tuned=is_tuned, sizes=sizes)
    return replace(setup, notes=found.notes + setup.notes)


def kept_profile(pair: ModelPair, run_config: RunConfig) -> Profile:
    """Return the profile that was measured here of this pair, so placed; raises EdgespecError where there is none."""
    request = _TreeRequest(given={}, tree=TreeSettings(), is_tuned=False, temperature=0.0, workload=None)
    facts_with = _facts_with(PairSizes(pair, run_config), run_config, request)
    return read_kept_profile(pair, run_config.device, facts_with)


def _facts_with(sizes: PairSizes, run_config: RunConfig, request: _TreeRequest) -> FactsWith:
    """Return a function that gives the pair's facts with a profile's trees."""

    def facts_with(profile: Profile) -> PairFacts:
        plan = plan_at(profile, request.temperature).best
        tree = tree_settings(plan, given=request.given)
        try:
            # A plan to grow no trees was measured with a draft beside the layers, as the user's own trees need it.
            placed = sizes.place(request.tree if tree.policy == "none" else tree, run_config)
        except EdgespecError:
            placed = sizes.place(request.tree, run_config)
        return pair_facts(sizes.pair, run_config, placed.placement)

    return facts_with


def _with_texts(sizes: PairSizes, run_config: RunConfig, request: _TreeRequest, shares: PassShares) -> RunConfig:
    """Return the run with the texts under way that the workload has, or that pay; without one it stays as it is."""
    if request.workload is None:
        return run_config
    return with_workload(
        run_config, request.workload, place=lambda own: sizes.place(request.tree, own).placement, shares=shares
    )


def _set_up_by_plan(
    sizes: PairSizes, run_config: RunConfig, request: _TreeRequest, found: FoundProfile, profile: Profile
) -> PairSetup:
    """Set the pair up by the profile's plan: the texts under way, then trees, then the largest ones, then limits."""
    plan = plan_at(profile, request.temperature)
    run_config = _with_texts(sizes, run_config, request, pass_shares(profile, plan))
    choice = _tree_of_plan(sizes, run_config, request, plan)
    has_limits = choice.tree.policy == plan.best.policy  # its own, which were measured
    if not has_limits:
        choice = _with_stop_gain(choice, request, profile)
    is_tuned = request.is_tuned and choice.tree.policy != "none"
    largest = _largest_of_plan(sizes, run_config, choice.tree, is_tuned=is_tuned)
    largest_tree = largest.tree
    if not has_limits and choice.tree.policy == "sequoia":
        choice = _with_limits(choice, largest_tree, request, profile)
        largest_tree = replace(largest_tree, depth=choice.tree.depth)
    return PairSetup(
        pair=sizes.pair, run_config=run_config, tree=choice.tree, is_tuned=is_tuned,
        largest_tree=largest_tree if is_tuned else choice.tree,
        weights=weights_by_use(largest.weights, profile),
        profile=profile, plan=plan, differences=found.differences, notes=found.notes + choice.notes,
    )  # fmt: skip


def _tree_of_plan(
    sizes: PairSizes, run_config: RunConfig, request: _TreeRequest, plan: TemperaturePlan
) -> _TreesWithNotes:
    """Return the plan's trees for so many texts, with the settings that the user gave."""
    tree = tree_settings(plan_for_texts(plan, run_config.num_texts), given=request.given)
    if tree.policy == "none":
        tree = tree_settings(plan.best, given=request.given)  # some texts may be left alone in the end
    if tree.policy != "none":
        return _TreesWithNotes(tree=tree, notes=sizes.notes(tree, run_config))
    return _TreesWithNotes(tree=tree, notes=(plan.why,) if plan.best.policy == "none" else ())


def _with_stop_gain(choice: _TreesWithNotes, request: _TreeRequest, profile: Profile) -> _TreesWithNotes:
    """Return OPT-Tree's trees with the delta that the profile's seconds give, unless the user gave one."""
    if choice.tree.policy != "opt-tree" or "stop_gain" in request.given:
        return choice
    tree, notes = with_stop_gain(choice.tree, profile)
    return _TreesWithNotes(tree=tree, notes=choice.notes + notes)


def _largest_of_plan(sizes: PairSizes, run_config: RunConfig, tree: TreeSettings, *, is_tuned: bool) -> LargestTree:
    """Place the trees, or the largest of their kind where they tune themselves; raises EdgespecError.

    The profile is of the layers where its plan leaves them: larger trees must leave them there too. Its depth is that
    of a few places, and what a layer must gain is tuned.
    """
    own = LargestTree(tree=tree, weights=sizes.place(tree, run_config))
    if not is_tuned:
        return own
    deep = replace(tree, depth=max(tree.depth, TreeSettings().depth)) if tree.uses("depth") else tree
    return sizes.largest(deep, run_config, slack=0.0)


def _with_limits(
    choice: _TreesWithNotes, largest_tree: TreeSettings, request: _TreeRequest, profile: Profile
) -> _TreesWithNotes:
    """Return Sequoia's trees of the size and depth that the profile's seconds give, unless the user gave one."""
    if request.given.keys() & {"size", "depth"}:
        return choice
    tree, notes = with_best_limits(choice.tree, largest_tree, profile, request.temperature)
    return _TreesWithNotes(tree=tree, notes=choice.notes + notes)
