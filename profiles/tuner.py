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

import math
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

    def within(self, sizes: NDArray[np.int64], depth: int) -> tuple[Floats, Floats, Floats]:
        """The cuts to this depth and each of these ascending sizes, without making them.

        Their tokens [sizes], nodes [sizes] and nodes that have children, by layer [sizes, depth].
        """
        shallow = self.depths <= depth
        place = np.cumsum(shallow) - 1
        tokens = 1.0 + np.concatenate([[0.0], np.cumsum(self.values[shallow])])
        nodes = np.minimum(sizes, len(tokens) - 1)
        parents = np.flatnonzero(self.first_child < len(self.scores))
        parents = parents[shallow[self.first_child[parents]]]
        from_size = np.searchsorted(sizes, place[self.first_child[parents]], side="right")
        inner = np.zeros((len(sizes) + 1, max(1, depth)))
        np.add.at(inner, (from_size, self.depths[parents]), 1.0)
        inner = inner.cumsum(0)[:-1]
        inner[:, 0] = 1.0
        return tokens[nodes], nodes.astype(np.float64), inner

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Table:
    """What each of an entrant's trees would have yielded within every size and depth of a grid."""

    limits: tuple[tuple[int, int], ...]  # size, depth of each plan
    tokens: Floats  # [trees, plans]
    nodes: Floats  # [trees, plans]
    seconds: Floats  # [trees, plans], of a step


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
    return Plan(
        policy="none", size=0, depth=0, tokens=1.0, nodes=0.0, step_s=costs.plain_step_s, num_texts=costs.num_texts
    )


def predict(entrant: Entrant, costs: StepCosts, *, size: int, depth: int, threshold: float = 0.0) -> Plan:
    """Return the plan that an entrant would yield within these limits."""
    # Scores of a shape are by depth, below zero: without a threshold all of them count.
    trees = [tree.cut(size=size, depth=depth, threshold=threshold or -math.inf) for tree in entrant.samples]
    inner = np.stack([tree.inner(max(1, depth)) for tree in trees])
    nodes = np.array([len(tree.scores) for tree in trees], dtype=np.float64)
    growth_s = entrant.growth.seconds(costs.draft, inner, (inner > 0).sum(1), nodes, num_texts=costs.num_texts)
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
        num_texts=costs.num_texts,
    )


def tabulate(entrant: Entrant, costs: StepCosts, *, sizes: Sequence[int], depths: Sequence[int]) -> Table:
    """All plans of an entrant at once; a preset shape is its only plan."""
    if not entrant.is_budgeted:
        sizes = [max(len(tree.scores) for tree in entrant.samples)]
        depths = [max(int(tree.depths.max(initial=0)) for tree in entrant.samples)]
    limits: list[tuple[int, int]] = []
    tokens: list[Floats] = []
    nodes: list[Floats] = []
    seconds: list[Floats] = []
    for depth in [depth for depth in depths if depth <= max(sizes)]:
        fitting = np.array([size for size in sizes if size >= depth])
        found = [tree.within(fitting, depth) for tree in entrant.samples]
        inner = np.stack([part[2] for part in found])
        limits += [(int(size), depth) for size in fitting]
        tokens.append(np.stack([part[0] for part in found]))
        nodes.append(np.stack([part[1] for part in found]))
        calls = (inner > 0).sum(-1)
        growth_s = entrant.growth.seconds(costs.draft, inner, calls, nodes[-1], num_texts=costs.num_texts)
        seconds.append(costs.step(growth_s, nodes[-1]))
    return Table(
        limits=tuple(limits),
        tokens=np.concatenate(tokens, axis=1),
        nodes=np.concatenate(nodes, axis=1),
        seconds=np.concatenate(seconds, axis=1),
    )


def choose(entrants: Sequence[Entrant], costs: StepCosts, *, sizes: Sequence[int], depths: Sequence[int]) -> Choice:
    """Return the plan of most tokens a second over all entrants, sizes, depths and thresholds.

    Entrants grew their trees at the same texts.
    """
    plain = plain_plan(costs)
    ranked: list[Plan] = []
    smaller: dict[tuple[str, str | None], Plan] = {}
    by_size: dict[int, Plan] = {}
    for entrant in entrants:
        table = tabulate(entrant, costs, sizes=sizes, depths=depths)
        sizes_of = np.array([size for size, _ in table.limits])
        nodes = table.nodes.mean(0)
        for size in {table.limits[place][0] for place in np.flatnonzero(nodes >= FULL * sizes_of)}:
            plan = _fastest(entrant, costs, table, (sizes_of == size) & (nodes >= FULL * size))
            if size not in by_size or plan.tokens_per_s > by_size[size].tokens_per_s:
                by_size[size] = plan
        best = _fastest(entrant, costs, table, np.full(len(nodes), fill_value=True))
        best = _with_threshold(entrant, costs, best) if entrant.takes_threshold else best
        ranked.append(best)
        is_small = (nodes > 0) & (nodes <= SMALLER * best.nodes)
        if is_small.any():
            smaller[best.policy, best.draw] = _fastest(entrant, costs, table, is_small)
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


def _fastest(entrant: Entrant, costs: StepCosts, table: Table, among: NDArray[np.bool_]) -> Plan:
    """Of these plans of an entrant, at least one."""
    speeds = table.tokens.mean(0) / table.seconds.mean(0)  # of each text
    size, depth = table.limits[int(np.where(among, speeds, -np.inf).argmax())]
    return predict(entrant, costs, size=size, depth=depth)


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


def marginal_threshold(entrant: Entrant, costs: StepCosts, plan: Plan) -> float:
    """Return the tokens that a node must be expected to add to be worth its seconds.

    Its worth is told at the speed and size of `plan`.
    """
    num_texts = costs.num_texts
    rows = num_texts * plan.nodes / max(1, plan.depth) * entrant.growth.rows_per_inner
    node_s = costs.verify.slope(num_texts * plan.nodes) + entrant.growth.node_s
    node_s += entrant.growth.rows_per_inner * costs.draft.slope(max(1.0, rows))
    return min(0.5, plan.tokens_per_s * node_s)


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
