"""The tuner finds the plan of most tokens a second, from trees that were grown and costs that were measured.

A budgeted policy's trees are nested: the m best nodes by score, of those no deeper than d and no worse
than a threshold, are the tree that budget m, depth d and that threshold would have grown, as far as the
large tree holds so many nodes above depth d. So one large tree at a text says what every smaller setting
would have yielded there,

    tokens(m, d, threshold) = 1 + sum of the true chances of those nodes

and a setting's speed is the sum of its trees' tokens over the sum of their steps' seconds. The
threshold follows from the marginal rule: with lambda the tokens a second of the best plan so far, a node
pays if the tokens it is expected to add exceed lambda times the seconds that it adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from profiles.cost import Floats, GrowthCost, StepCosts
from profiles.schema import Plan

NUM_LAMBDA_STEPS = 4
SMALLER = 0.5  # of the best plan's nodes, at most
DEEPER = 0.02  # of the speed, at most, that more depth may seem to cost
FULL = 0.75  # of its size: a tree with fewer nodes says nothing about that size


@dataclass(frozen=True, slots=True, eq=False)
class TreeSample:
    """One large tree at one text, without its root, best nodes first."""

    scores: Floats  # [n], descending
    values: Floats  # [n], the exact chance that verification accepts the node
    depths: NDArray[np.int64]  # [n], 1 is below the root
    first_child: NDArray[np.int64]  # [n], place of its best child; n where it has none

    @classmethod
    def from_nodes(cls, *, scores: ArrayLike, values: ArrayLike, depths: ArrayLike, parents: ArrayLike) -> TreeSample:
        """Make a sample of nodes [n] in any order that has parents first.

        `parents` count from the root, which is -1.
        """
        score = np.asarray(scores, dtype=np.float64)
        order = np.argsort(-score, kind="stable")
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        above = np.asarray(parents, dtype=np.int64)
        first_child = np.full(len(order), len(order), dtype=np.int64)
        has_parent = above >= 0
        np.minimum.at(first_child, above[has_parent], place[has_parent])
        return cls(
            scores=score[order],
            values=np.asarray(values, dtype=np.float64)[order],
            depths=np.asarray(depths, dtype=np.int64)[order],
            first_child=first_child[order],
        )

    def cut(self, *, size: int, depth: int, threshold: float) -> TreeSample:
        """Return the tree that these limits would have grown."""
        kept = np.flatnonzero((self.depths <= depth) & (self.scores >= threshold))[:size]
        place = np.full(len(self.scores) + 1, len(kept), dtype=np.int64)
        place[kept] = np.arange(len(kept))
        return TreeSample(self.scores[kept], self.values[kept], self.depths[kept], place[self.first_child[kept]])

    @property
    def tokens(self) -> float:
        """The expected tokens of a pass, the bonus token included."""
        return 1.0 + float(self.values.sum())

    def inner(self, num_layers: int) -> Floats:
        """Return the number of nodes that have children, by layer from the root's on: [num_layers].

        The draft always looks at the root.
        """
        inner = self.depths[self.first_child < len(self.scores)]
        found = np.bincount(inner, minlength=num_layers)[:num_layers].astype(np.float64)
        found[0] = 1.0
        return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Entrant:
    """A policy with one draw, and what it grew at a number of texts."""

    policy: str
    draw: str  # sampled | chosen
    samples: Sequence[TreeSample]
    growth: GrowthCost
    is_budgeted: bool = True  # False: the shape is what it is
    takes_threshold: bool = False  # scores are expected tokens, so that the marginal rule applies
    branching: tuple[int, ...] = ()  # of a preset shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The best plan, the plans that it was chosen from, and plain decoding."""

    best: Plan
    runner_up: Plan | None  # of another policy or draw
    plain: Plan
    by_size: tuple[Plan, ...]  # the best plan of every size
    ranked: tuple[Plan, ...]  # the best of every policy and draw, fastest first
    smaller: Plan | None = None  # the fastest of the first of those with clearly fewer nodes


def plain_plan(costs: StepCosts) -> Plan:
    """Return the plan of decoding without a tree."""
    return Plan(policy="none", size=0, depth=0, tokens=1.0, nodes=0.0, step_s=costs.plain_step_s)


def predict(entrant: Entrant, costs: StepCosts, *, size: int, depth: int, threshold: float = 0.0) -> Plan:
    """Return the plan that an entrant would yield within these limits."""
    trees = _cut(entrant, size=size, depth=depth, threshold=threshold)
    inner = np.stack([tree.inner(max(1, depth)) for tree in trees])
    nodes = np.array([len(tree.scores) for tree in trees], dtype=np.float64)
    growth_s = entrant.growth.seconds(costs.draft, inner, (inner > 0).sum(1), nodes)
    return Plan(
        policy=entrant.policy,
        draw=entrant.draw,
        size=size,
        depth=depth,
        threshold=threshold,
        branching=entrant.branching,
        tokens=float(np.mean([tree.tokens for tree in trees])),
        promised=float(np.mean([1 + tree.scores.sum() for tree in trees])) if entrant.takes_threshold else None,
        nodes=float(nodes.mean()),
        step_s=float(costs.step(growth_s, nodes).mean()),
    )


def choose(entrants: Sequence[Entrant], costs: StepCosts, *, sizes: Sequence[int], depths: Sequence[int]) -> Choice:
    """Return the plan of most tokens a second over all entrants, sizes, depths and thresholds.

    Plain decoding is among the plans. Entrants grew their trees at the same texts; those that fell behind grew theirs
    at the first of these texts only. The others must be better than the first entrant by more than chance: `_compared`.
    """
    plain = plain_plan(costs)
    ranked: list[Plan] = []
    smaller: dict[tuple[str, str | None], Plan] = {}
    by_size: dict[int, Plan] = {}
    for entrant in entrants:
        plans = _plans(entrant, costs, sizes, depths)
        for plan in plans:
            is_full = plan.nodes >= FULL * plan.size
            if is_full and (plan.size not in by_size or plan.tokens_per_s > by_size[plan.size].tokens_per_s):
                by_size[plan.size] = plan
        best = max(plans, key=lambda plan: plan.tokens_per_s)
        best = _with_threshold(entrant, costs, best) if entrant.takes_threshold else best
        few = [plan for plan in plans if 0 < plan.nodes <= SMALLER * best.nodes]
        found = [best, *([max(few, key=lambda plan: plan.tokens_per_s)] if few else [])]
        if ranked:
            found = [_compared(plan, entrant, ranked[0], entrants[0]) for plan in found]
        ranked.append(found[0])
        smaller |= {(plan.policy, plan.draw): plan for plan in found[1:]}
    ranked.sort(key=lambda plan: plan.tokens_per_s, reverse=True)  # stable: of two alike the first entrant's
    every = [*ranked, plain]
    every.sort(key=lambda plan: plan.tokens_per_s, reverse=True)
    return Choice(
        best=every[0],
        runner_up=every[1] if len(every) > 1 else None,
        plain=plain,
        by_size=tuple(by_size[size] for size in sorted(by_size)),
        ranked=tuple(ranked),
        smaller=smaller.get((ranked[0].policy, ranked[0].draw)),
    )


def deepened(plan: Plan, entrant: Entrant, costs: StepCosts, *, depths: Sequence[int]) -> Plan:
    """Return the plan with the most depth that hardly seems to cost speed.

    Texts that repeat themselves are accepted to any depth. Few samples hold such a place, and a run has many.
    """

    def at(depth: int) -> Plan:
        return predict(entrant, costs, size=plan.size, depth=depth, threshold=plan.threshold)

    if not entrant.is_budgeted:
        return plan
    own = at(plan.depth)
    for depth in sorted((depth for depth in depths if plan.depth < depth <= plan.size), reverse=True):
        deep = at(depth)
        if deep.tokens_per_s >= (1 - DEEPER) * own.tokens_per_s:
            return with_tokens(deep, plan.tokens * deep.tokens / own.tokens)
    return plan


def with_tokens(plan: Plan, tokens: float) -> Plan:
    """Return the plan with so many tokens a pass: never fewer than one, nor more than its nodes allow."""
    return replace(plan, tokens=min(1.0 + plan.nodes, max(1.0, tokens)))


def _cut(entrant: Entrant, *, size: int, depth: int, threshold: float) -> list[TreeSample]:
    return [tree.cut(size=size, depth=depth, threshold=threshold) for tree in entrant.samples]


def _compared(plan: Plan, entrant: Entrant, first_plan: Plan, first: Entrant) -> Plan:
    """Return the plan with tokens that follow from the difference to the first entrant's, at their common texts.

    One standard error of that difference is taken off: the luckiest of a dozen policies is not the best of them.
    """
    ours, theirs = (
        np.array([tree.tokens for tree in _cut(of, size=cut.size, depth=cut.depth, threshold=cut.threshold)])
        for of, cut in ((entrant, plan), (first, first_plan))
    )
    common = min(len(ours), len(theirs))
    gain = ours[:common] - theirs[:common]
    error = float(gain.std(ddof=1)) / common**0.5 if common > 1 else 0.0
    return with_tokens(plan, float(theirs.mean() + gain.mean()) - error)


def marginal_threshold(entrant: Entrant, costs: StepCosts, plan: Plan) -> float:
    """Return the tokens that a node must be expected to add to be worth its seconds.

    Its worth is told at the speed and size of `plan`.
    """
    rows = plan.nodes / max(1, plan.depth) * entrant.growth.rows_per_inner
    node_s = costs.verify.slope(plan.nodes) + entrant.growth.node_s
    node_s += entrant.growth.rows_per_inner * costs.draft.slope(max(1.0, rows))
    return min(0.5, plan.tokens_per_s * node_s)


def _plans(entrant: Entrant, costs: StepCosts, sizes: Sequence[int], depths: Sequence[int]) -> list[Plan]:
    if not entrant.is_budgeted:
        size = max(len(tree.scores) for tree in entrant.samples)
        depth = max((int(tree.depths.max()) for tree in entrant.samples if len(tree.depths)), default=0)
        return [predict(entrant, costs, size=size, depth=depth)]
    return [predict(entrant, costs, size=size, depth=depth) for size in sizes for depth in depths if depth <= size]


def _with_threshold(entrant: Entrant, costs: StepCosts, plan: Plan) -> Plan:
    """Return the plan with the threshold that the marginal rule gives, where that is faster."""
    largest = max(len(tree.scores) for tree in entrant.samples)
    deepest = max(int(tree.depths.max(initial=1)) for tree in entrant.samples)
    best = plan
    for _ in range(NUM_LAMBDA_STEPS):
        threshold = marginal_threshold(entrant, costs, best)
        if threshold <= 0:
            break
        # The budget is only a cap then: trees of easy texts may be larger than the best fixed size.
        found = [
            predict(entrant, costs, size=size, depth=depth, threshold=threshold)
            for size in sorted({best.size, min(2 * best.size, largest), largest})
            for depth in sorted({best.depth, min(2 * best.depth, deepest), deepest})
        ]
        fastest = max(found, key=lambda plan: plan.tokens_per_s)
        if fastest.tokens_per_s <= best.tokens_per_s * (1 + 1e-6):
            break
        best = fastest
    return best
