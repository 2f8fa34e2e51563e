"""What tuning has learned, as a profile keeps it, and a tuner that begins with that."""

from __future__ import annotations

import math
from collections.abc import Container

from edgespec.draft.calls import BY_LAYER, DraftCalls
from edgespec.tuning.calibration import ScoreCalibration
from edgespec.tuning.costs import GrowthCosts, StepCosts
from edgespec.tuning.tokens_by_size import MeanTree
from edgespec.tuning.tree_choice import TreeChoice
from edgespec.tuning.tree_limits import TreeLimits
from profiles.schema import GrowthSeconds, PassCurve, PassPoint, Plan, Profile, SizeTokens, TemperaturePlan


def plan_at(profile: Profile, temperature: float) -> TemperaturePlan:
    """Return the plan of the nearest measured temperature; greedy decoding has its own where there is one."""
    return min(
        profile.plans,
        key=lambda plan: ((plan.temperature == 0) != (temperature == 0), abs(plan.temperature - temperature)),
    )


def plan_for_texts(plan: TemperaturePlan, num_texts: int) -> Plan:
    """Return the plan for the number of texts that is nearest to this one."""
    return min((plan.best, *plan.by_texts), key=lambda found: abs(math.log2(found.num_texts / num_texts)))


def pass_curves(costs: StepCosts, numbers: Container[int]) -> tuple[PassCurve, ...]:
    """Return the seconds of passes over rows, for these numbers of texts that share them."""
    return tuple(
        PassCurve(
            num_texts=num_texts,
            points=tuple(PassPoint(rows=rows, seconds=seconds) for rows, seconds in points if rows >= num_texts),
        )
        for num_texts, points in sorted(costs.points().items())
        if num_texts in numbers
    )


def growth_seconds(costs: StepCosts) -> GrowthSeconds:
    """Return the seconds of growing trees."""
    tree_s, layer_s, node_s = costs.growth.parts()
    return GrowthSeconds(tree_s=tree_s, layer_s=layer_s, node_s=node_s)


def known_costs(profile: Profile, calls: DraftCalls = BY_LAYER) -> StepCosts:
    """Return costs that begin with a profile's, of a draft that is called so."""
    growth = profile.growth
    passes = {curve.num_texts: [(point.rows, point.seconds) for point in curve.points] for curve in profile.passes}
    parts = (growth.tree_s, growth.layer_s, growth.node_s)
    found = GrowthCosts(parts if any(parts) else None, calls=calls)
    return StepCosts(known_passes=passes, growth=found)


def plan_of(choice: TreeChoice, num_texts: int) -> Plan:
    """Return the results of one sampling's choice, for passes that `num_texts` texts share."""
    yields, calibration, costs, limits = choice.yields, choice.calibration, choice.costs, choice.limits
    tree = dict(zip(yields.sizes, yields.all(), strict=True))[limits.size]
    step_s, plain_s = costs.of(tree, num_texts), costs.plain_s(num_texts)
    return Plan(
        num_texts=num_texts,
        pays=not choice.is_plain,
        size=limits.size,
        threshold=limits.threshold,
        stop_gain=limits.stop_gain,
        tokens=tree.tokens,
        nodes=tree.nodes,
        step_s=step_s,
        plain_step_s=plain_s,
        num_trees=yields.num_trees,
        share_full=yields.share_full,
        by_size=tuple(
            SizeTokens(size=size, tokens=mean.tokens, nodes=mean.nodes, layers=mean.layers, weight=weight)
            for size, mean, weight in yields.seen()
        ),
        promised=tuple(calibration.promised),
        kept=tuple(calibration.kept),
    )


def recall(choice: TreeChoice, plan: Plan) -> None:
    """Let a choice begin with earlier results, for the sizes that it has."""
    yields = choice.yields
    yields.num_trees, yields.share_full = plan.num_trees, plan.share_full
    yields.recall([(at.size, MeanTree(at.tokens, at.nodes, at.layers), at.weight) for at in plan.by_size])
    choice.calibration = ScoreCalibration(plan.promised, plan.kept)
    size = min(yields.sizes, key=lambda size: abs(math.log2(size / plan.size)))
    choice.limits = choice.last = TreeLimits(size, plan.threshold, plan.stop_gain)
    choice.in_step, choice.is_plain = choice.limits, not plan.pays
