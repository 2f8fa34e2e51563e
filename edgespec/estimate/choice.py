"""Which of several drafts pays on a machine, by the sums of estimates: each is placed, and its best tree is reckoned.

A draft's acceptance, and the seconds of its trees on this machine, are what earlier runs here have learned of it
(`tuning/draft_memory.py`); else acceptance is as drafts of its kind are known to have it, and seconds are reckoned. So
one that was never tried counts by what is known of its kind, and one that brought less than that gives way in the next
runs, until what is known of it has aged. None of them is loaded for it. A processor counts as fast as other programs
leave it just now: a draft then takes longer, and weights over a link do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Unpack

from edgespec.draft.own_parts import calls_of, is_copy
from edgespec.errors import EdgespecError
from edgespec.estimate.speed import (
    PairOnHardware,
    SpeedEstimate,
    estimate_best,
    estimate_plain,
    locked_bytes_here,
    place_on,
)
from edgespec.hub.names import BUILT_IN_TARGET
from edgespec.machine.device import core_share
from edgespec.pair.choices import DraftChoice
from edgespec.pair.folder import ModelFolder
from edgespec.pair.pair import ModelPair
from edgespec.pair.tree_support import check_may_draft, supported_trees
from edgespec.placement.acceptance import acceptance_of_draft
from edgespec.placement.copied_layers import deep_trees
from edgespec.placement.kept_speed import growth_place, hardware_here
from edgespec.placement.pair_profile import facts_where_placed, find_pair_profile
from edgespec.placement.parallel import PassShares, Workload, pass_shares, with_workload
from edgespec.placement.place import PairWeights, read_memory
from edgespec.placement.profile_trees import measured_draft
from edgespec.placement.run_config import RunConfig, RunConfigOptions, resolve_run_config
from edgespec.placement.weights import weights_by_size
from edgespec.tree.settings import TreeOptions, TreeSettings
from edgespec.tuning.draft_memory import LearnedRate, learned_growth
from edgespec.tuning.memory import plan_at, plan_for_texts
from offload.placement import Placement
from offload.unpacked_once import lent_bytes
from profiles.schema import Profile

MOST_NODES = 64  # of trees that are tried: larger ones change no choice, and take seconds to reckon


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTrees:
    """The trees that any of the drafts is to grow."""

    settings: TreeSettings
    size: int | None = None  # None: any
    has_depth: bool = False  # whether somebody has named their depth
    options: TreeOptions = field(default_factory=TreeOptions)  # by which a profile is looked for

    @classmethod
    def given(cls, trees: TreeOptions) -> DraftTrees:
        """Return what a user says of trees."""
        return cls(
            settings=trees.settings, size=trees.explicit.get("size"), has_depth="depth" in trees.explicit, options=trees
        )

    def of(self, target: ModelFolder, draft: ModelFolder, *, keeps_row_bits: bool) -> TreeSettings:
        """Return the trees that a draft grows for a target; raises EdgespecError for such as it cannot follow."""
        tree = self.settings if self.has_depth else deep_trees(self.settings, draft)
        return supported_trees(target, tree, has_draft=True, keeps_row_bits=keeps_row_bits)

    @classmethod
    def held_to(cls, tree: TreeSettings | None, *, profile: str = "none") -> DraftTrees:
        """Return trees of these settings alone; None: any, as a `profile` has them."""
        if tree is None:
            return cls.given(TreeOptions(profile=profile))
        return cls(settings=tree, size=tree.size if tree.uses("size") else None, has_depth=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReckonedDraft:
    """A draft at hand, and what it would bring."""

    draft: DraftChoice
    pair: PairOnHardware
    tree: TreeSettings
    estimate: SpeedEstimate | None = None  # None: it cannot draft here
    about: str = ""  # where its acceptance is from, or why it cannot

    @property
    def tokens_per_s(self) -> float:
        """The likely tokens a second of all texts; 0 where it cannot draft."""
        return 0.0 if self.estimate is None else self.estimate.likely.tokens_per_s

    @property
    def num_bytes(self) -> int:
        """The memory of its weights, and of what it borrows of the target, where that is unpacked for it."""
        if self.estimate is None or (draft := self.estimate.weights.draft) is None:
            return 0
        weights = self.estimate.weights
        borrowed_bytes = lent_bytes(weights.target.skeleton, lends=bool(draft.skeleton.lent))
        return weights.placement.device_bytes.get("draft: weights", 0) + borrowed_bytes


def with_best_draft(
    pair: ModelPair, trees: DraftTrees, *, temperature: float, workload: Workload | None = None,
    **options: Unpack[RunConfigOptions],
) -> ModelPair:  # fmt: skip
    """Return the pair with the draft at hand that makes most tokens a second here; other pairs as they are.

    `options` are those of the run; a `workload` says how many texts share its passes in place of them. Where no trees
    grow the pair has no draft. Raises EdgespecError where none can run.
    """
    if not pair.is_undecided:
        return pair
    if not trees.settings.needs_draft:
        return pair.decided(DraftChoice(model=None), "")
    run_config = resolve_run_config(pair.target, pair.max_context, **options)
    hardware, assumptions = hardware_here(run_config.device, pair.target.checkpoint.files)
    share = core_share(run_config.device)
    hardware = hardware.shared(share)
    target = weights_by_size(pair.target, dtype=run_config.dtype, quant=run_config.quant)
    alone = PairOnHardware(
        weights=PairWeights(target=target, draft=None), hardware=hardware, assumptions=assumptions,
        run_config=run_config, memory=read_memory(run_config.limits, run_config.device), draws=temperature > 0,
        locked_bytes=locked_bytes_here(assumptions), is_here=True, core_share=share,
    )  # fmt: skip
    alone = _with_texts(alone, trees.settings.plain(), workload)
    found = reckon_drafts(alone, pair.at_hand, trees, temperature=temperature or None, workload=workload, **options)
    pair.target.spare[run_config.dtype] = target.skeleton
    best = best_of(found)
    for one in found:  # to be placed again
        if one.pair.weights.draft is not None:
            one.pair.weights.draft.model.spare[run_config.dtype] = one.pair.weights.draft.skeleton
    others = [one.draft.model for one in found if one is not best and one.estimate is not None]
    by = "" if hardware.sources.get("all") else f" (by the data sheet of '{hardware.name}': edgespec estimate measures)"
    beside = "" if share == 1 else f"; other programs leave {100 * share:.0f} % of a core"
    return pair.decided(best.draft, in_words(found, best) + by + beside, filter(None, others))


def reckon_drafts(
    pair: PairOnHardware, drafts: Sequence[DraftChoice], trees: DraftTrees, *, temperature: float | None,
    workload: Workload | None = None, **options: Unpack[RunConfigOptions],
) -> list[ReckonedDraft]:  # fmt: skip
    """Return what each draft would bring the pair's target in place of the pair's own, with trees of these settings.

    Raises EdgespecError where the target does not fit even without a draft.
    """
    if not drafts:
        return []
    alone = replace(pair, weights=replace(pair.weights, draft=None))
    plain = estimate_plain(alone)
    return [_reckoned(alone, plain, draft, trees, temperature, workload, options) for draft in drafts]


def best_of(found: Sequence[ReckonedDraft]) -> ReckonedDraft:
    """Return the fastest; among equals the first. Raises EdgespecError where none can draft."""
    best = max(found, key=lambda one: one.tokens_per_s)
    if best.estimate is None:
        what = "; ".join(f"{one.draft.name}: {one.about}" for one in found)
        raise EdgespecError("E_MEMORY", f"none of the drafts can be used ({what}).", "Add none: `draft=...,none`.")
    return best


def in_words(found: Sequence[ReckonedDraft], best: ReckonedDraft) -> str:
    """Return which draft was chosen, what it is expected to bring, and what the others are."""
    others = sorted((one for one in found if one is not best), key=lambda one: -one.tokens_per_s)
    return f"draft: {_speed(best, ' expected')}; " + "; ".join(map(_speed, others))


def _speed(one: ReckonedDraft, more: str = "") -> str:
    if one.estimate is None:
        return f"{one.draft.name}: {one.about}"
    return f"{one.draft.name}{more} {one.tokens_per_s:.3g} tokens/s"


def _with_texts(
    pair: PairOnHardware, tree: TreeSettings, workload: Workload | None, shares: PassShares | None = None
) -> PairOnHardware:
    """Return the pair with as many texts under way as a run of this workload would have."""
    if workload is None:
        return pair

    def place(run_config: RunConfig) -> Placement:
        return place_on(replace(pair, run_config=run_config), tree).placement

    run_config = with_workload(pair.run_config, workload, place=place, shares=shares or PassShares())
    return replace(pair, run_config=run_config)


def _as_measured(
    pair: PairOnHardware, draft: ModelFolder, tree: TreeSettings, trees: DraftTrees, temperature: float,
    workload: Workload | None,
) -> tuple[PairOnHardware, LearnedRate | None]:  # fmt: skip
    """Return the pair with its texts under way and the growth that was measured, and acceptance that a profile has."""
    if not pair.is_here:
        return _with_texts(pair, tree, workload), None
    profile = _profile_of(pair, draft, trees.options, temperature)
    if profile is None:
        pair = _with_texts(pair, tree, workload)
        place = growth_place(pair.run_config)
        growth = learned_growth(pair.weights.target.model, draft, place, share=pair.core_share)
        return replace(pair, growth=growth), None
    plan = plan_at(profile, temperature)
    pair = _with_texts(pair, tree, workload, pass_shares(profile, plan))
    found = measured_draft(profile, plan_for_texts(plan, pair.run_config.num_texts), calls_of(draft.parts))
    return (pair, None) if found is None else (replace(pair, growth=found[1]), found[0])


def _profile_of(pair: PairOnHardware, draft: ModelFolder, options: TreeOptions, temperature: float) -> Profile | None:
    """Return the profile that a run with this draft would follow; one of another draft's file says nothing of it."""
    if options.profile == "none":
        return None
    target, run_config = pair.weights.target.model, pair.run_config
    facts_with = facts_where_placed(
        target, draft, run_config, trees=options, temperature=temperature, place=partial(place_on, pair)
    )
    names = target.folder.name, draft.named.name
    with suppress(EdgespecError):
        return find_pair_profile(options.profile, names, run_config.device, facts_with).profile
    return None


def _reckoned(
    alone: PairOnHardware, plain: SpeedEstimate, draft: DraftChoice, trees: DraftTrees, temperature: float | None,
    workload: Workload | None, options: RunConfigOptions,
) -> ReckonedDraft:  # fmt: skip
    model, target = draft.model, alone.weights.target
    without = ReckonedDraft(draft=draft, pair=alone, tree=trees.settings.plain())
    if model is None:
        return replace(without, estimate=plain, about="one token a pass, or what the text repeats")
    if is_copy(model.parts) and plain.weights.placement.is_resident:
        return replace(without, about="all of its layers stay in memory, and a copy would replace none")
    try:
        check_may_draft(target.model, model)
        run_config = resolve_run_config(target.model, None, draft=model, is_planned_only=True, **options)
        weights = weights_by_size(model, dtype=run_config.dtype, quant=run_config.draft_quant)
        pair = replace(alone, weights=PairWeights(target=target, draft=weights), run_config=run_config)
        tree = trees.of(target.model, model, keeps_row_bits=run_config.needs_row_bits)
        if tree.policy == "none":
            return replace(without, about="texts grow no trees here")
        pair, measured = _as_measured(pair, model, tree, trees, temperature or 0.0, workload)
        is_built_in = target.model.folder == BUILT_IN_TARGET
        acceptance = acceptance_of_draft(
            pair.weights, tree, temperature, is_built_in=is_built_in, expects_less=True, measured=measured
        )
        found = estimate_best(pair, tree, acceptance.rates, size=trees.size, most_nodes=MOST_NODES)
    except EdgespecError as error:
        return replace(without, about=error.what.partition("\n")[0].rstrip(":. "))
    return ReckonedDraft(draft=draft, pair=pair, tree=tree, estimate=found, about=acceptance.about)
