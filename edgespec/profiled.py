"""A profile becomes settings, once it is known to be of this pair on this machine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from edgespec.errors import EdgespecError, profile_errors
from edgespec.files import profiles_folder, shown_place
from edgespec.inputs import checked
from edgespec.measured import pass_shares, plan_at, plan_for_texts, with_best_limits, with_stop_gain
from edgespec.model.device import most_threads
from edgespec.pair.folder import fingerprint
from edgespec.pair.pair import ModelPair
from edgespec.placement.largest_tree import largest_tree_that_fits
from edgespec.placement.parallel import PassShares
from edgespec.placement.place import Memory, PairWeights, PlacedWeights, pair_weights, place_weights, read_memory
from edgespec.placement.run_config import RunConfig
from edgespec.placement.weights import notes_of_draft
from edgespec.tree.policies import policy_named
from edgespec.tree.settings import TreeSettings
from offload.placement import Placement
from profiles.files import changes_between, find_profile, read_profile
from profiles.measure import machine_facts
from profiles.schema import WITH_LAYERS, PairFacts, Plan, Profile, TemperaturePlan

# Tree settings that leave the size to be tuned
SAY_NO_SIZE = {"policy", "draw", "max_children", "acceptance", "classifier", "draft_temperature"}
Place = Callable[[TreeSettings, RunConfig], PlacedWeights]
STREAMED_SLACK = 0.03  # more bytes a pass for room for larger trees


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSetup:
    """A pair with its trees chosen and its weights placed, which is all that loading it takes."""

    pair: ModelPair
    run_config: RunConfig
    tree: TreeSettings
    largest_tree: TreeSettings  # the largest trees that memory is planned for
    weights: PlacedWeights
    is_tuned: bool = False  # whether trees change as they pay, up to `room`
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


def pair_facts(pair: ModelPair, run_config: RunConfig, placement: Placement) -> PairFacts:
    """Return the facts that a profile of this pair, so placed, is known by."""
    assert pair.draft is not None
    return PairFacts(
        target=pair.target.folder.name,
        target_fingerprint=fingerprint(pair.target),
        draft=pair.draft.folder.name,
        draft_fingerprint=fingerprint(pair.draft),
        quant=run_config.quant or "none",
        draft_quant=run_config.draft_quant or "none",
        dtype=str(run_config.dtype).removeprefix("torch."),
        device=run_config.device.type,
        threads=most_threads(run_config.threads, run_config.device),
        num_layers=placement.num_layers,
        resident_layers=placement.num_resident,
        ram_layers=placement.num_pinned,
        disk_layers=placement.num_on_disk,
        experts=_movement_of_experts(run_config, placement),
    )


def _movement_of_experts(run_config: RunConfig, placement: Placement) -> str:
    if placement.experts is None:
        return WITH_LAYERS
    return "computed on the CPU" if run_config.experts == "cpu" else "on demand"


def set_up(
    pair: ModelPair,
    run_config: RunConfig,
    tree: TreeSettings | None = None,
    *,
    is_tuned: bool | None = None,
    profile: Profile | None = None,
) -> PairSetup:
    """Set the pair up with these trees, or with trees that tune themselves.

    Plain decoding leaves the draft out. `is_tuned` lets given trees be the first of those that tune themselves.
    Raises EdgespecError where the pair does not fit.
    """
    tree = checked("tree", tree, TreeSettings | None)
    is_tuned = tree is None if is_tuned is None else is_tuned
    tree = tree or TreeSettings()
    if pair.draft is None or tree.policy == "none":
        tree, is_tuned = tree.plain(), False
    weights = pair_weights(pair.target, pair.draft if tree.policy != "none" else None, run_config)
    notes = notes_of_draft(weights.target, weights.draft, run_config.context_tokens)
    memory = read_memory(run_config.limits, run_config.device)
    if not is_tuned:
        placed = place_weights(weights, tree, run_config, memory)
        return PairSetup(pair=pair, run_config=run_config, tree=tree, largest_tree=tree, weights=placed,
                         profile=profile, notes=notes)  # fmt: skip
    largest_tree = largest_tree_that_fits(
        tree,
        lambda tree: place_weights(weights, tree, run_config, memory),
        num_texts=run_config.num_texts,
        slack=STREAMED_SLACK,
    )
    return PairSetup(
        pair=pair, run_config=run_config, tree=tree.within(largest_tree.tree), largest_tree=largest_tree.tree,
        weights=largest_tree.weights, is_tuned=True, profile=profile, notes=notes,
    )  # fmt: skip


def set_up_by_profile(
    pair: ModelPair,
    run_config: RunConfig,
    *,
    source: str,
    given: Mapping[str, Any],
    temperature: float,
    share_passes: Callable[[RunConfig, PassShares], RunConfig] = lambda run_config, _shares: run_config,
) -> PairSetup:
    """Set the pair up with the trees that the user gave, over the profile's plan, over the defaults.

    The plan is the profile's for this temperature. `source` is auto (the profile that was measured here for this pair,
    if any), none, or a profile's file. A profile is matched against the placement that its trees have for one text;
    `share_passes` then says how many texts are under way. Raises EdgespecError for a file that cannot be used, and
    where the pair does not fit.
    """
    source, own = checked("profile", source, str), TreeSettings(**given)
    is_tuned = source in ("auto", "none") and own.policy != "none" and given.keys() <= SAY_NO_SIZE
    if source == "none" or pair.draft is None or own.policy == "none":
        return set_up(pair, share_passes(run_config, PassShares()), own, is_tuned=is_tuned)
    weights = pair_weights(pair.target, pair.draft, run_config)
    placed = _placer(weights, read_memory(run_config.limits, run_config.device))
    facts_with = _matcher(pair, run_config, placed, given, temperature)
    profile, differences, notes = _find(source, pair, run_config.device, facts_with)
    if profile is None:
        found = set_up(pair, share_passes(run_config, PassShares()), own, is_tuned=is_tuned)
        return replace(found, notes=notes + found.notes)
    plan = plan_at(profile, temperature)
    run_config = share_passes(run_config, pass_shares(profile, plan))
    tree = tree_settings(plan_for_texts(plan, run_config.num_texts), given=given)
    if tree.policy == "none":
        tree = tree_settings(plan.best, given=given)  # some texts may be left alone in the end
    if plan.best.policy == "none" and tree.policy == "none":
        notes += (plan.why,)
    if tree.policy != "none":
        notes += notes_of_draft(weights.target, weights.draft, run_config.context_tokens)
    is_planned = tree.policy == plan.best.policy  # a plan has its own limits
    if tree.policy == "opt-tree" and not is_planned and "stop_gain" not in given:
        tree, why = with_stop_gain(tree, profile)
        notes += why
    found = PairSetup(
        pair=pair, run_config=run_config, tree=tree, largest_tree=tree, weights=_by_use(placed(tree, run_config),
        profile), profile=profile, plan=plan, differences=differences, notes=notes,
    )  # fmt: skip
    if is_tuned and tree.policy != "none":
        # The profile is of the layers where its plan leaves them: larger trees must leave them there too. Its depth is
        # that of a few places, and what a layer must gain is tuned.
        deep = replace(tree, depth=max(tree.depth, TreeSettings().depth)) if tree.uses("depth") else tree
        num_texts = run_config.num_texts
        largest = largest_tree_that_fits(deep, lambda t: placed(t, run_config), num_texts=num_texts, slack=0.0)
        found = replace(found, largest_tree=largest.tree, weights=_by_use(largest.weights, profile), is_tuned=True)
    if tree.policy == "sequoia" and not is_planned and not given.keys() & {"size", "depth"}:
        tree, why = with_best_limits(tree, found.largest_tree, profile, temperature)
        tree_with_depth = replace(found.largest_tree, depth=tree.depth) if is_tuned else tree
        found = replace(found, tree=tree, largest_tree=tree_with_depth, notes=(*found.notes, *why))
    return found


def kept_profile(pair: ModelPair, run_config: RunConfig) -> Profile:
    """Return the profile that was measured here of this pair, so placed; raises EdgespecError where there is none."""
    weights, memory = (
        pair_weights(pair.target, pair.draft, run_config),
        read_memory(run_config.limits, run_config.device),
    )
    placed = _placer(weights, memory)
    folder = profiles_folder()
    with profile_errors():
        machine, facts_with = machine_facts(run_config.device), _matcher(pair, run_config, placed, {}, 0.0)
        found = find_profile(folder, machine, pair.names, facts_with)
    if found.profile is not None:
        return found.profile
    why = f", and '{found.path}' does not fit: {'; '.join(found.stale)}" if found.stale else ""
    names = " + ".join(filter(None, pair.names))
    what = f"no profile of {names} on this machine is kept in '{shown_place(folder)}'{why}."
    raise EdgespecError("E_PROFILE_NOT_FOUND", what, "Measure it: edgespec profile.")


def _placer(weights: PairWeights, memory: Memory) -> Place:
    """Return a function that places the weights for trees, within this memory."""
    return functools.cache(lambda tree, run_config: place_weights(weights, tree, run_config, memory))


def _matcher(
    pair: ModelPair,
    run_config: RunConfig,
    placed: Place,
    given: Mapping[str, Any],
    temperature: float,
) -> Callable[[Profile], PairFacts]:
    """Return a function that gives the pair's facts with a profile's trees."""
    own = TreeSettings(**given)

    def facts_with(profile: Profile) -> PairFacts:
        tree = tree_settings(plan_at(profile, temperature).best, given=given)
        try:
            # A plan to grow no trees was measured with a draft beside the layers, as the user's own trees need it.
            found = placed(own if tree.policy == "none" else tree, run_config)
        except EdgespecError:
            found = placed(own, run_config)
        return pair_facts(pair, run_config, found.placement)

    return facts_with


def _find(
    source: str, pair: ModelPair, device: torch.device, facts_with: Callable[[Profile], PairFacts]
) -> tuple[Profile | None, tuple[str, ...], tuple[str, ...]]:
    """Return the profile, how what it was measured with differs, and what is to be said about it."""
    machine = machine_facts(device)
    with profile_errors():
        if source == "auto":
            found = find_profile(profiles_folder(), machine, pair.names, facts_with)
            if found.stale:
                changes = "; ".join(found.stale)
                return None, (), (f"the profile of this pair is not used: {changes} (measure again: edgespec profile)",)
            return found.profile, (), ()
        profile = read_profile(Path(source))
    facts = facts_with(profile)
    _require_same_pair(source, profile.pair, facts)
    differences = tuple(changes_between(profile, machine, facts))
    notes = (f"profile {profile.name} was measured elsewhere: {'; '.join(differences)}",) if differences else ()
    return profile, differences, notes


def _require_same_pair(source: str, old: PairFacts, new: PairFacts) -> None:
    """Raise EdgespecError where acceptance was measured with other models."""
    for name in ("target", "draft"):
        before, now = (getattr(facts, f"{name}_fingerprint") for facts in (old, new))
        if before != now:
            raise EdgespecError(
                "E_PROFILE",
                f"'{source}' was measured with {name} '{getattr(old, name)}' ({before}), "
                f"this is '{getattr(new, name)}' ({now}).",
                "Measure this pair: edgespec profile.",
            )


def _by_use(weights: PlacedWeights, profile: Profile) -> PlacedWeights:
    """Return the weights with a mixture's experts placed by the use of them that the profile measured."""
    if (experts := weights.placement.experts) is None or not (use := profile.expert_use):
        return weights
    found, own = list(map(len, use)), [group.num_experts for group in weights.target.skeleton.experts]
    if found != own:
        what = f"profile {profile.name} counts the use of {found} experts by layer, and the target has {own}."
        raise EdgespecError("E_PROFILE", what, "Measure this pair: edgespec profile.")
    return replace(weights, placement=replace(weights.placement, experts=replace(experts, use=use)))


def tree_settings(plan: Plan, *, given: Mapping[str, Any] | None = None) -> TreeSettings:
    """Return the plan as settings, with single values `given` by the user instead.

    A policy of the user's drops the plan, and so does what the plan's policy has no use for.
    """
    given = dict(given or {})
    if given.get("policy", plan.policy) != plan.policy:
        return TreeSettings(**given)
    policy = policy_named(plan.policy)
    if not all(map(policy.uses, given)) or given.get("draw", policy.draws[0]) not in policy.draws:
        return TreeSettings(**given)
    values: dict[str, Any] = {"policy": plan.policy}
    if policy.budget is not None:
        values[policy.budget] = max(1, plan.size)
    if policy.uses("depth"):
        values["depth"] = max(1, plan.depth)
    if plan.branching and "fork" not in given:
        values["branching"] = plan.branching
    values |= {name: getattr(plan, name) for name in ("draw", "threshold") if policy.uses(name)}
    return replace(TreeSettings(**values), **given) if given else TreeSettings(**values)
