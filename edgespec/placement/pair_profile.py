"""Which profile is of this pair on this machine."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from edgespec.errors import EdgespecError, profile_errors
from edgespec.machine.device import most_threads
from edgespec.pair.folder import ModelFolder, fingerprint
from edgespec.pair.pair import ModelPair
from edgespec.placement.number_formats import quant_named
from edgespec.placement.pair_sizes import PlaceTree
from edgespec.placement.place import PlacedWeights
from edgespec.placement.profile_trees import tree_settings
from edgespec.placement.run_config import RunConfig
from edgespec.tree.settings import TreeOptions
from edgespec.tuning.memory import plan_at
from edgespec.user_paths import profiles_folder, shown_place
from offload.placement import Placement
from profiles.files import changes_between, find_profile, read_profile
from profiles.measure import machine_facts
from profiles.schema import WITH_LAYERS, PairFacts, Profile

FactsWith = Callable[[Profile], PairFacts]  # the pair's facts, placed with the trees of a profile


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundProfile:
    """The profile that a run follows, if there is one."""

    profile: Profile | None = None
    differences: tuple[str, ...] = ()  # from what it was measured with, each with both values
    notes: tuple[str, ...] = ()  # for people


def pair_facts(
    target: ModelFolder, draft: ModelFolder | None, run_config: RunConfig, placement: Placement
) -> PairFacts:
    """Return the facts that a profile of this pair, so placed, is known by."""
    assert draft is not None
    return PairFacts(
        target=target.folder.name,
        target_fingerprint=fingerprint(target),
        draft=draft.named.name,
        draft_fingerprint=fingerprint(draft),
        quant=quant_named(target, run_config.quant),
        draft_quant=quant_named(draft, run_config.draft_quant),
        dtype=str(run_config.dtype).removeprefix("torch."),
        device=run_config.device.type,
        threads=most_threads(run_config.threads, run_config.device),
        num_layers=placement.num_layers,
        resident_layers=placement.num_resident,
        ram_layers=placement.num_pinned,
        disk_layers=placement.num_on_disk,
        experts=_movement_of_experts(run_config, placement),
    )


def facts_where_placed(
    target: ModelFolder, draft: ModelFolder | None, run_config: RunConfig, *, trees: TreeOptions, temperature: float,
    place: PlaceTree,
) -> FactsWith:  # fmt: skip
    """Return a function that gives the pair's facts with a profile's trees, which `place` places."""

    def facts_with(profile: Profile) -> PairFacts:
        tree = tree_settings(plan_at(profile, temperature).best, trees)
        try:
            # A plan to grow no trees was measured with a draft beside the layers, as the user's own trees need it.
            placed = place(trees.settings if tree.policy == "none" else tree)
        except EdgespecError:
            placed = place(trees.settings)
        return pair_facts(target, draft, run_config, placed.placement)

    return facts_with


def _movement_of_experts(run_config: RunConfig, placement: Placement) -> str:
    if placement.experts is None:
        return WITH_LAYERS
    return "computed on the CPU" if run_config.expert_mode == "cpu" else "on demand"


def find_pair_profile(
    source: str, names: tuple[str, str | None], device: torch.device, facts_with: FactsWith
) -> FoundProfile:
    """Return the profile of a file, or for `auto` the one that was measured here of the pair of these names, if any.

    Raises EdgespecError for a file that cannot be used.
    """
    machine = machine_facts(device)
    with profile_errors():
        if source == "auto":
            found = find_profile(profiles_folder(), machine, names, facts_with)
            if found.stale:
                why = f"the profile of this pair is not used: {'; '.join(found.stale)}"
                return FoundProfile(notes=(f"{why} (measure again: edgespec profile)",))
            return FoundProfile(profile=found.profile)
        profile = read_profile(Path(source))
    facts = facts_with(profile)
    _require_same_pair(source, profile.pair, facts)
    differences = tuple(changes_between(profile, machine, facts))
    notes = (f"profile {profile.name} was measured elsewhere: {'; '.join(differences)}",) if differences else ()
    return FoundProfile(profile=profile, differences=differences, notes=notes)


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


def read_kept_profile(pair: ModelPair, device: torch.device, facts_with: FactsWith) -> Profile:
    """Return the profile that was measured here of this pair; raises EdgespecError where there is none."""
    folder = profiles_folder()
    with profile_errors():
        found = find_profile(folder, machine_facts(device), pair.names, facts_with)
    if found.profile is not None:
        return found.profile
    why = f", and '{found.path}' does not fit: {'; '.join(found.stale)}" if found.stale else ""
    names = " + ".join(filter(None, pair.names))
    what = f"no profile of {names} on this machine is kept in '{shown_place(folder)}'{why}."
    raise EdgespecError("E_PROFILE_NOT_FOUND", what, "Measure it: edgespec profile.")


def weights_by_use(weights: PlacedWeights, profile: Profile) -> PlacedWeights:
    """Return the weights with a mixture's experts placed by the use of them that the profile measured."""
    if (experts := weights.placement.experts) is None or not (use := profile.expert_use):
        return weights
    found, own = list(map(len, use)), [group.num_experts for group in weights.target.skeleton.expert_groups]
    if found != own:
        what = f"profile {profile.name} counts the use of {found} experts by layer, and the target has {own}."
        raise EdgespecError("E_PROFILE", what, "Measure this pair: edgespec profile.")
    return replace(weights, placement=replace(weights.placement, experts=replace(experts, use=use)))
