"""A pair is set up: its trees are chosen, the texts that share a pass are counted, and its weights are placed.

All of it is planned in one reading of the memory, with one skeleton of each model: `PairSizes` has both. A run's
`Workload`, the user's trees and a profile go in, and a `PairSetup` comes out, which is all that loading takes.
"""

from dataclasses import dataclass, replace

from edgespec.draft.own_parts import calls_of
from edgespec.errors import EdgespecError
from edgespec.pair.mtp import without_description
from edgespec.pair.pair import ModelPair
from edgespec.pair.tree_support import check_may_draft, notes_of_support, supported_trees, tree_support
from edgespec.placement.copied_layers import deep_trees, notes_of_copy
from edgespec.placement.exact import check_exact
from edgespec.placement.own_layer import acceptance_of_layer, steps_here, weigh_own_layer
from edgespec.placement.pair_profile import (
    FactsWith,
    FoundProfile,
    facts_where_placed,
    find_pair_profile,
    read_kept_profile,
    weights_by_use,
)
from edgespec.placement.pair_sizes import PairSizes
from edgespec.placement.parallel import PassShares, Workload, pass_shares, with_workload
from edgespec.placement.place import PairWeights, PlacedWeights
from edgespec.placement.profile_trees import tree_settings, with_best_limits, with_stop_gain
from edgespec.placement.run_config import RunConfig
from edgespec.tree.settings import TreeOptions, TreeSettings
from edgespec.tuning.memory import plan_at, plan_for_texts
from edgespec.validation import checked
from offload.placement import Placement
from profiles.schema import Profile, TemperaturePlan

# Tree settings that leave the size to be tuned
SAY_NO_SIZE = {"policy", "draw", "max_children", "acceptance", "classifier", "draft_temperature", "lookup"}
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


def set_up(
    pair: ModelPair,
    run_config: RunConfig,
    tree: TreeSettings | None = None,
    *,
    is_tuned: bool | None = None,
    profile: Profile | None = None,
    sizes: PairSizes | None = None,
    slack: float = STREAMED_SLACK,
) -> PairSetup:
    """Set the pair up with these trees, or with trees that tune themselves.

    Plain decoding leaves the draft out. `is_tuned` lets given trees be the first of those that tune themselves, which
    may become so large that a share of `slack` more is streamed. `sizes` are those that another plan of this pair has
    read. Raises EdgespecError where the pair does not fit.
    """
    tree = checked("tree", tree, TreeSettings | None)
    is_tuned = tree is None if is_tuned is None else is_tuned
    tree = tree or deep_trees(TreeSettings(), pair.draft)
    sizes = sizes or PairSizes(pair, run_config)
    temperature = pair.default_sampling().temperature
    pair, of_layer = _with_draft_that_may_pay(pair, sizes, tree, run_config, temperature=temperature)
    if tree.needs_draft:
        check_may_draft(pair.target, pair.draft)
    keeps = run_config.needs_row_bits
    tree = supported_trees(pair.target, tree, has_draft=pair.draft is not None, keeps_row_bits=keeps)
    if pair.draft is not None:
        tree = tree.up_to(calls_of(pair.draft.parts).deepest)
    check_exact(tree, run_config, pair.target)
    is_tuned = is_tuned and tree.policy != "none"
    notes = notes_of_support(pair.target, keeps_row_bits=keeps) + of_layer + sizes.notes(tree, run_config)
    if is_tuned:
        largest_tree, weights = _largest(sizes, tree, run_config, slack=slack)
        if largest_tree.policy == "none":
            tree, is_tuned = largest_tree, False
    else:
        largest_tree, weights = tree, sizes.place(tree, run_config)
    notes += notes_of_copy(weights.target, weights.draft, weights.placement)
    return PairSetup(
        pair=pair, run_config=run_config, tree=tree.within(largest_tree), largest_tree=largest_tree, weights=weights,
        is_tuned=is_tuned, profile=profile, notes=notes,
    )  # fmt: skip


def _largest(
    sizes: PairSizes, tree: TreeSettings, run_config: RunConfig, *, slack: float
) -> tuple[TreeSettings, PlacedWeights]:
    """Place the largest trees; looked up text that has no draft beside it takes no memory that layers would have."""
    if tree.needs_draft:
        return sizes.largest(tree, run_config, slack=slack)
    plain = sizes.place(tree.plain(), run_config)
    try:
        largest_tree, weights = sizes.largest(tree, run_config, slack=slack)
    except EdgespecError:
        return tree.plain(), plain
    is_free = weights.placement.pass_bytes <= (1 + slack) * plain.placement.pass_bytes
    return (largest_tree, weights) if is_free else (tree.plain(), plain)


def set_up_by_profile(
    pair: ModelPair,
    run_config: RunConfig,
    trees: TreeOptions,
    *,
    temperature: float,
    workload: Workload | None = None,
    sizes: PairSizes | None = None,
) -> PairSetup:
    """Set the pair up with the trees that the user gave, over the profile's plan, over the defaults.

    The plan is the profile's for this temperature. `trees.profile` is auto (the profile that was measured here for this
    pair, if any), none, or a profile's file. A profile is matched against the placement that its trees have for one
    text; `workload` then says how many texts are under way, in place of `run_config`. Raises EdgespecError for a file
    that cannot be used, and where the pair does not fit.
    """
    sizes = sizes or PairSizes(pair, run_config)
    keeps = run_config.needs_row_bits
    tree = supported_trees(pair.target, trees.settings, has_draft=pair.draft is not None, keeps_row_bits=keeps)
    tree = tree if "depth" in trees.explicit else deep_trees(tree, pair.draft)
    is_tuned = trees.profile in ("auto", "none") and tree.policy != "none" and trees.explicit.keys() <= SAY_NO_SIZE
    found = FoundProfile()
    if trees.profile != "none" and tree.needs_draft:
        facts_with = _facts_with(sizes, run_config, trees, temperature)
        found = find_pair_profile(trees.profile, pair.names, run_config.device, facts_with)
    profile = found.profile
    if profile is None:
        pair, of_layer = _with_draft_that_may_pay(pair, sizes, tree, run_config, temperature=temperature)
        tree = supported_trees(pair.target, tree, has_draft=pair.draft is not None, keeps_row_bits=keeps)
        is_tuned = is_tuned and tree.policy != "none"
    else:
        pair, of_layer = replace(pair, has_default_draft=False), ()  # what it brings was measured
    if workload is not None:
        shares = PassShares() if profile is None else pass_shares(profile, plan_at(profile, temperature))
        run_config = with_workload(
            run_config, workload, place=lambda own: sizes.place(tree, own).placement, shares=shares
        )
    if profile is None:
        setup = set_up(pair, run_config, tree, is_tuned=is_tuned, sizes=sizes)
    else:
        setup = _set_up_by_plan(pair, sizes, run_config, trees, profile, temperature=temperature, is_tuned=is_tuned)
    return replace(setup, differences=found.differences, notes=found.notes + of_layer + setup.notes)


def kept_profile(pair: ModelPair, run_config: RunConfig) -> Profile:
    """Return the profile that was measured here of this pair, so placed; raises EdgespecError where there is none."""
    facts_with = _facts_with(PairSizes(pair, run_config), run_config, TreeOptions(), temperature=0.0)
    return read_kept_profile(pair, run_config.device, facts_with)


def _facts_with(sizes: PairSizes, run_config: RunConfig, trees: TreeOptions, temperature: float) -> FactsWith:
    """Return a function that gives the pair's facts with a profile's trees."""
    return facts_where_placed(
        sizes.pair.target, sizes.pair.draft, run_config, trees=trees, temperature=temperature,
        place=lambda tree: sizes.place(tree, run_config),
    )  # fmt: skip


def _with_draft_that_may_pay(
    pair: ModelPair, sizes: PairSizes, tree: TreeSettings, run_config: RunConfig, *, temperature: float
) -> tuple[ModelPair, tuple[str, ...]]:
    """Return the pair without a draft that nobody has named and that cannot pay, and what is to be said of it.

    Measured acceptance that the user has named is that of the `temperature`.
    """
    if pair.draft is None or not pair.has_default_draft or not tree.needs_draft:
        return pair, ()
    if tree_support(pair.target).has_own_passes:
        return replace(pair, draft=None, has_default_draft=False), ()
    step_of = steps_here(run_config, pair.target.checkpoint)
    acceptance = acceptance_of_layer(PairWeights(target=sizes.target, draft=sizes.draft), tree, temperature)
    found = weigh_own_layer(tree, lambda tree: sizes.place(tree, run_config), step_of, acceptance)
    draft = without_description(pair.draft) if found.drafts else None
    return replace(pair, draft=draft, has_default_draft=False), (found.why,)


def _set_up_by_plan(
    pair: ModelPair,
    sizes: PairSizes,
    run_config: RunConfig,
    trees: TreeOptions,
    profile: Profile,
    *,
    temperature: float,
    is_tuned: bool,
) -> PairSetup:
    """Set the pair up with the plan's trees, or with others that follow the profile's seconds.

    The profile is of the layers where its plan leaves them: larger trees must leave them there too.
    """
    plan = plan_at(profile, temperature)
    tree = tree_settings(plan_for_texts(plan, run_config.num_texts), trees)
    if tree.policy == "none":
        tree = tree_settings(plan.best, trees)  # some texts may be left alone in the end
    notes: tuple[str, ...] = (plan.why,) if tree.policy == plan.best.policy == "none" else ()
    if tree.policy == "opt-tree" and "stop_gain" not in trees.explicit:
        tree, note = with_stop_gain(tree, profile)
        notes = (note,)
    setup = set_up(pair, run_config, tree, is_tuned=is_tuned, profile=profile, sizes=sizes, slack=0.0)
    if tree.policy == "sequoia" and not trees.explicit.keys() & {"size", "depth"}:
        tree, note = with_best_limits(setup.tree, setup.largest_tree, profile, temperature)
        largest_tree = replace(setup.largest_tree, depth=tree.depth) if setup.is_tuned else tree
        setup, notes = replace(setup, tree=tree, largest_tree=largest_tree), (note,)
    weights = weights_by_use(setup.weights, profile)
    return replace(setup, plan=plan, weights=weights, notes=setup.notes + notes)
