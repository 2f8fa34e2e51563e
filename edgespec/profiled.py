"""From a profile to settings: whether it is of this pair on this machine, and what it says to do.

Raises EdgespecError where the profiles room raises its own.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from edgespec.config import MemoryLimits
from edgespec.errors import EdgespecError
from edgespec.files import profiles_folder
from edgespec.grow.acceptance import AcceptanceModel
from edgespec.model.device import resolve_dtype
from edgespec.model.target import offload_errors
from edgespec.pair.folder import fingerprint
from edgespec.pair.pair import ModelPair
from edgespec.placement.plan import plan_pair
from edgespec.tree.settings import USED_BY, TreeSettings
from offload.placement import Placement
from profiles.cost import Curve
from profiles.errors import ProfileError
from profiles.files import changes_between, find_profile, read_profile
from profiles.measure import machine_facts
from profiles.schema import PairFacts, Plan, Profile, TemperaturePlan

BUDGETED = ("adaptive", "dyspec", "opt-tree", "eagle2", "c2t", "sequoia")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """What a run is to be done with."""

    tree: TreeSettings
    profile: Profile | None
    plan: TemperaturePlan | None
    notes: tuple[str, ...]  # for people: why a profile is not used, or what to know of the one that is

    @property
    def predicted_per_s(self) -> float | None:
        """Tokens a second that the plan promises; None where it is not followed to the letter."""
        if self.plan is None or self.tree != tree_settings(self.plan.best):
            return None
        return self.plan.best.tokens_per_s


@contextmanager
def profile_errors() -> Iterator[None]:
    """Turn the profiles room's errors into ours."""
    try:
        yield
    except ProfileError as error:
        raise EdgespecError(error.code, error.what, error.fix) from error


def pair_facts(
    pair: ModelPair, placement: Placement, *, quant: str | None, draft_quant: str | None, dtype: torch.dtype,
    device: torch.device,
) -> PairFacts:  # fmt: skip
    """What a profile of this pair, so placed, is known by."""
    assert pair.draft is not None
    return PairFacts(
        target=pair.target.folder.name,
        target_fingerprint=fingerprint(pair.target),
        draft=pair.draft.folder.name,
        draft_fingerprint=fingerprint(pair.draft),
        quant=quant or "none",
        draft_quant=draft_quant or "none",
        dtype=str(dtype).removeprefix("torch."),
        device=device.type,
        num_layers=placement.num_layers,
        resident_layers=placement.num_resident,
        ram_layers=placement.num_pinned,
        disk_layers=placement.num_on_disk,
    )


def settle(
    pair: ModelPair,
    *,
    source: str,
    given: Mapping[str, Any],
    temperature: float,
    limits: MemoryLimits,
    device: torch.device,
    dtype: str,
    quant: str | None,
    draft_quant: str | None,
    context_tokens: int,
    prompt_tokens: int | None,
) -> Settled:
    """Tree settings: what the user gave, over the profile's plan for this temperature, over the defaults.

    `source` is auto (the profile that was measured here for this pair, if any), none, or a profile's file.
    Raises EdgespecError for a file that cannot be used.
    """
    own = TreeSettings(**given)
    if source == "none" or pair.draft is None or own.policy == "none":
        return Settled(tree=own, profile=None, plan=None, notes=())
    number_format = resolve_dtype(dtype, pair.target.config, device)
    most = min(context_tokens, pair.max_context or context_tokens)
    with offload_errors():
        memory = plan_pair(
            pair.target, pair.draft, tree=own, limits=limits, device=device, dtype=number_format, quant=quant,
            draft_quant=draft_quant, context_tokens=most, prompt_tokens=prompt_tokens or most,
        )  # fmt: skip
    facts = pair_facts(pair, memory.placement, quant=quant, draft_quant=draft_quant, dtype=number_format, device=device)
    profile, notes = _find(source, facts)
    if profile is None:
        return Settled(tree=own, profile=None, plan=None, notes=notes)
    plan = plan_at(profile, temperature)
    tree = tree_settings(plan.best, given=given)
    if plan.best.policy == "none" and tree.policy == "none":
        notes += (plan.why,)
    return Settled(tree=tree, profile=profile, plan=plan, notes=notes)


def _find(source: str, facts: PairFacts) -> tuple[Profile | None, tuple[str, ...]]:
    """The profile, and what is to be said about it."""
    machine = machine_facts()
    with profile_errors():
        if source == "auto":
            found = find_profile(profiles_folder(), machine, facts)
            if found.stale:
                changes = "; ".join(found.stale)
                return None, (f"the profile of this pair is not used: {changes} (measure again: edgespec profile)",)
            return found.profile, ()
        profile = read_profile(Path(source))
    _require_same_pair(source, profile.pair, facts)
    differences = changes_between(profile, machine, facts)
    notes = (f"profile {profile.name} was measured elsewhere: {'; '.join(differences)}",) if differences else ()
    return profile, notes


def _require_same_pair(source: str, old: PairFacts, new: PairFacts) -> None:
    """Raise EdgespecError where acceptance was measured of other models."""
    for name in ("target", "draft"):
        before, now = (getattr(facts, f"{name}_fingerprint") for facts in (old, new))
        if before != now:
            raise EdgespecError(
                "E_PROFILE",
                f"'{source}' was measured with {name} '{getattr(old, name)}' ({before}), "
                f"this is '{getattr(new, name)}' ({now}).",
                "Measure this pair: edgespec profile, or leave out `profile`.",
            )


def plan_at(profile: Profile, temperature: float) -> TemperaturePlan:
    """The plan of the nearest measured temperature; greedy decoding has its own where there is one."""
    return min(
        profile.plans,
        key=lambda plan: ((plan.temperature == 0) != (temperature == 0), abs(plan.temperature - temperature)),
    )


def tree_settings(plan: Plan, *, given: Mapping[str, Any] | None = None) -> TreeSettings:
    """The plan as settings, with single values `given` by the user instead; a policy of theirs drops the plan."""
    given = dict(given or {})
    is_foreign = any(name in USED_BY and plan.policy not in USED_BY[name] for name in given)
    if given.get("policy", plan.policy) != plan.policy or is_foreign:
        return TreeSettings(**given)
    values: dict[str, Any] = {"policy": plan.policy}
    if plan.policy in BUDGETED:
        values |= {"size": max(1, plan.size), "depth": max(1, plan.depth)}
    if plan.policy == "chain":
        values["draft_tokens"] = max(1, plan.size)
    if plan.branching and "fork" not in given:
        values["branching"] = plan.branching
    values |= {name: getattr(plan, name) for name in ("draw", "threshold") if plan.policy in USED_BY[name]}
    return replace(TreeSettings(**values), **given) if given else TreeSettings(**values)


def acceptance_of(profile: Profile) -> AcceptanceModel:
    """The pair's acceptance model."""
    return _acceptance(profile.name, json.dumps(profile.acceptance))


def verify_curve(profile: Profile) -> Curve:
    """Seconds of a pass over nodes below the root."""
    return Curve(
        tuple(float(timing.count) for timing in profile.verify), tuple(timing.median_s for timing in profile.verify)
    )


@functools.lru_cache(maxsize=4)
def _acceptance(name: str, document: str) -> AcceptanceModel:
    return AcceptanceModel.from_document(json.loads(document), Path(f"{name}.toml"))
