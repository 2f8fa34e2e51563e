"""The plan: nested trees, the argmax of the model, and machines whose best plan is known beforehand."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from profiles.cost import Curve, GrowthCost, StepCosts
from profiles.tuner import Entrant, TreeSample, choose, deepened, marginal_threshold, predict, tabulate

FREE = GrowthCost(base_s=0.0, layer_s=0.0, node_s=0.0, rows_per_inner=1.0)


def sample(seed: int, nodes: int = 60, acceptance: float = 0.8, branching: int = 2) -> TreeSample:
    """A tree of which each child is accepted as its rank says, with some luck."""
    luck = np.random.default_rng(seed)
    parents = [-1 if node < branching else node // branching - 1 for node in range(nodes)]
    values, depths = [], []
    for node, parent in enumerate(parents):
        share = acceptance * (1 - acceptance) ** (node % branching) * luck.uniform(0.6, 1.0)
        values.append(share * (values[parent] if parent >= 0 else 1.0))
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
    return TreeSample.from_nodes(scores=values, values=values, depths=depths, parents=parents)


def chain_sample(acceptance: float, length: int = 24) -> TreeSample:
    values = [acceptance ** (depth + 1) for depth in range(length)]
    return TreeSample.from_nodes(
        scores=[-1.0 - depth for depth in range(length)], values=values, depths=range(1, length + 1),
        parents=range(-1, length - 1),
    )  # fmt: skip


def entrant(policy: str = "adaptive", **changes: object) -> Entrant:
    made = Entrant(policy=policy, draw="sampled", samples=[sample(seed) for seed in range(5)], growth=FREE)
    return replace(made, **changes)  # type: ignore[arg-type]


def costs(pass_s: float, node_s: float, draft_s: float, free_nodes: int = 0) -> StepCosts:
    """A machine whose pass takes `pass_s`, and `node_s` more for each node behind the first `free_nodes`."""
    counts = (0.0, float(free_nodes or 1), 768.0)
    verify = Curve(counts, (pass_s, pass_s + (0 if free_nodes else node_s), pass_s + node_s * (768 - free_nodes)))
    return StepCosts(verify=verify, draft=Curve((1.0,), (draft_s,)), rest_s=1e-6, plain_step_s=pass_s + 1e-6)


SIZES, DEPTHS = (1, 2, 4, 8, 16, 32), (1, 2, 3, 6)


@pytest.mark.parametrize("one", [entrant(), entrant("chain", samples=[chain_sample(0.7), chain_sample(0.4, length=3)]),
                                 entrant("mcsd", is_budgeted=False)])  # fmt: skip
def test_the_table_says_of_every_plan_what_cutting_the_trees_says(one: Entrant) -> None:
    machine = costs(0.5, 0.001, 1e-3)
    table = tabulate(one, machine, sizes=SIZES, depths=DEPTHS)
    plans = [predict(one, machine, size=size, depth=depth) for size, depth in table.limits]
    assert table.tokens.mean(0).tolist() == pytest.approx([plan.tokens for plan in plans])
    assert table.nodes.mean(0).tolist() == pytest.approx([plan.nodes for plan in plans])
    assert table.seconds.mean(0).tolist() == pytest.approx([plan.step_s for plan in plans])
    fitting = {(size, depth) for size in SIZES for depth in DEPTHS if depth <= size}
    assert set(table.limits) == (fitting if one.is_budgeted else {(60, 5)})


def test_a_cut_tree_is_the_best_nodes_within_the_limits_with_their_parents() -> None:
    tree = TreeSample.from_nodes(
        scores=[0.5, 0.9, 0.4, 0.8, 0.3], values=[0.5, 0.9, 0.4, 0.8, 0.3], depths=[1, 1, 2, 2, 3],
        parents=[-1, -1, 0, 1, 3],
    )  # fmt: skip
    assert tree.cut(size=2, depth=9, threshold=0).tokens == pytest.approx(1 + 0.9 + 0.8)
    assert tree.cut(size=9, depth=1, threshold=0).tokens == pytest.approx(1 + 0.9 + 0.5)
    assert tree.cut(size=9, depth=9, threshold=0.45).tokens == pytest.approx(1 + 0.9 + 0.8 + 0.5)
    assert tree.inner(3).tolist() == [1, 2, 1]
    # Without its last node, the node above it has no children any more.
    assert tree.cut(size=4, depth=9, threshold=0).inner(3).tolist() == [1, 2, 0]
    assert tree.cut(size=0, depth=9, threshold=0).inner(3).tolist() == [1, 0, 0]  # the draft was asked


ALONE = [entrant()]
TWO = [entrant(), entrant("chain", samples=[chain_sample(0.7), chain_sample(0.6)])]


@settings(max_examples=60)
@given(
    st.sampled_from([ALONE, TWO]), st.floats(1e-3, 1), st.floats(1e-6, 0.1), st.floats(1e-6, 0.3),
    st.integers(0, 64),
)  # fmt: skip
@example(TWO, 1.0, 0.0625, 0.25, 0)
def test_the_choice_is_the_argmax_of_its_own_model(
    contenders: list[Entrant], pass_s: float, node_s: float, draft_s: float, free_nodes: int
) -> None:
    machine = costs(pass_s, node_s, draft_s, free_nodes)
    choice = choose(contenders, machine, sizes=SIZES, depths=DEPTHS)
    every = [
        predict(one, machine, size=size, depth=depth)
        for one, size, depth in itertools.product(contenders, SIZES, DEPTHS)
        if depth <= size
    ]
    best = max([*every, choice.plain], key=lambda plan: plan.tokens_per_s)
    assert choice.best.tokens_per_s == pytest.approx(best.tokens_per_s)
    assert choice.best.tokens_per_s >= choice.plain.tokens_per_s
    assert choice.runner_up is not None
    assert choice.runner_up.tokens_per_s <= choice.best.tokens_per_s


def test_the_smaller_plan_is_the_firsts_fastest_of_half_the_nodes() -> None:
    machine = costs(0.5, 0.001, 1e-3)
    choice = choose([entrant(), entrant("chain", samples=[chain_sample(0.7)])], machine, sizes=SIZES, depths=DEPTHS)
    assert choice.smaller is not None
    few = [
        plan
        for size, depth in itertools.product(SIZES, DEPTHS)
        if (plan := predict(entrant(), machine, size=size, depth=depth)).nodes <= choice.ranked[0].nodes / 2
    ]
    assert choice.ranked[0].policy == choice.smaller.policy == "adaptive"
    assert choice.smaller.tokens_per_s == max(plan.tokens_per_s for plan in few)


@given(st.floats(1e-3, 1), st.floats(0, 0.05), st.floats(1.01, 10))
def test_a_faster_link_is_never_predicted_slower(pass_s: float, node_s: float, faster: float) -> None:
    slow = choose([entrant()], costs(pass_s, node_s, 1e-3), sizes=SIZES, depths=DEPTHS)
    fast = choose([entrant()], costs(pass_s / faster, node_s, 1e-3), sizes=SIZES, depths=DEPTHS)
    assert fast.best.tokens_per_s >= slow.best.tokens_per_s * (1 - 1e-9)


def test_where_the_link_decides_the_tree_is_large() -> None:
    choice = choose([entrant()], costs(5.0, 1e-4, 1e-3, free_nodes=700), sizes=SIZES, depths=DEPTHS)
    assert (choice.best.policy, choice.best.size) == ("adaptive", 32)


def test_depth_that_hardly_seems_to_cost_anything_is_kept() -> None:
    """A place where a text repeats itself is accepted to any depth; samples may hold none."""
    machine = costs(5.0, 1e-4, 1e-3, free_nodes=700)
    plan = predict(entrant(), machine, size=32, depth=3)
    deep = deepened(plan, entrant(), machine, depths=(1, 2, 3, 4, 24, 48))
    assert (deep.size, deep.depth) == (32, 24)
    assert deep == predict(entrant(), machine, size=32, depth=24)


def test_depth_that_costs_speed_is_not_added() -> None:
    machine = costs(0.01, 1e-4, 0.02)
    plan = predict(entrant(), machine, size=32, depth=2)
    assert deepened(plan, entrant(), machine, depths=(1, 2, 3, 24)) == plan


def test_a_deeper_plan_keeps_what_its_tokens_were_lowered_by() -> None:
    """By the error of its comparison with the first policy."""
    machine = costs(5.0, 1e-4, 1e-3, free_nodes=700)
    plan = predict(entrant(), machine, size=32, depth=3)
    deep = deepened(plan, entrant(), machine, depths=(24,))
    lowered = deepened(replace(plan, tokens=0.9 * plan.tokens), entrant(), machine, depths=(24,))
    assert lowered.tokens == pytest.approx(0.9 * deep.tokens)


def test_where_computing_decides_the_tree_is_small() -> None:
    choice = choose([entrant()], costs(0.01, 0.004, 1e-4), sizes=SIZES, depths=DEPTHS)
    assert 1 <= choice.best.size <= 4


def test_a_chain_is_predicted_by_its_length() -> None:
    """Its nodes are ordered by depth, so their scores are below zero, and nothing may cut them off."""
    chain = entrant("chain", samples=[chain_sample(0.7)])
    plan = predict(chain, costs(1.0, 1e-4, 1e-4), size=4, depth=4)
    assert (plan.nodes, plan.tokens) == (4.0, pytest.approx(1 + sum(0.7**depth for depth in range(1, 5))))


def test_where_growth_is_dear_a_chain_is_the_better_tree() -> None:
    dear = entrant(growth=replace(FREE, base_s=0.05))
    contenders = [dear, entrant("chain", samples=[chain_sample(0.8)])]
    assert choose(contenders, costs(0.02, 0.001, 1e-3), sizes=SIZES, depths=DEPTHS).best.policy == "chain"


def test_where_the_draft_is_too_slow_there_is_no_tree() -> None:
    choice = choose([entrant()], costs(0.01, 1e-5, 0.05), sizes=SIZES, depths=DEPTHS)
    assert (choice.best.policy, choice.best.tokens) == ("none", 1.0)
    assert choice.runner_up is not None
    assert choice.runner_up.policy == "adaptive"


def test_the_marginal_rule_gives_a_threshold_that_pays() -> None:
    # Easy and hard texts: one size is wrong for both.
    texts = [sample(seed, acceptance=0.95) for seed in range(3)] + [sample(seed, acceptance=0.2) for seed in range(3)]
    machine = costs(0.02, 0.002, 1e-4)
    fixed = choose([entrant(samples=texts)], machine, sizes=SIZES, depths=DEPTHS).best
    free = choose([entrant(samples=texts, takes_threshold=True)], machine, sizes=SIZES, depths=DEPTHS).best
    assert fixed.threshold == 0
    assert free.threshold > 0
    assert free.tokens_per_s > 1.02 * fixed.tokens_per_s
    # lambda times the seconds of a node, at the slope of the curve
    rule = marginal_threshold(entrant(samples=texts), machine, fixed)
    assert rule == pytest.approx(fixed.tokens_per_s * machine.verify.slope(fixed.nodes), rel=1e-6)


def test_a_preset_shape_is_taken_whole() -> None:
    preset = entrant("mcsd", is_budgeted=False, branching=(2, 2))
    plan = choose([preset], costs(1.0, 1e-4, 1e-4), sizes=SIZES, depths=DEPTHS).ranked[0]
    assert (plan.size, plan.nodes, plan.branching) == (60, 60.0, (2, 2))


def test_the_more_texts_share_a_pass_the_smaller_is_each_tree_and_the_more_tokens_there_are() -> None:
    machine = costs(0.5, 0.01, 1e-4)
    plans = [
        choose([entrant()], replace(machine, num_texts=num_texts), sizes=SIZES, depths=DEPTHS).best
        for num_texts in (1, 4, 16)
    ]
    assert [plan.num_texts for plan in plans] == [1, 4, 16]
    nodes = [plan.nodes for plan in plans]
    assert nodes == sorted(nodes, reverse=True)
    assert nodes[0] > nodes[-1]
    assert plans[0].tokens_per_s < plans[1].tokens_per_s < plans[2].tokens_per_s
    assert plans[1].tokens_per_s == pytest.approx(4 * plans[1].tokens / plans[1].step_s)
