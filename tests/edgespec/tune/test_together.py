"""What several texts cost in a pass, measured, and the plans that follow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from edgespec import Engine, TreeSettings
from edgespec.grow.acceptance import default_acceptance
from edgespec.pair.pair import open_pair
from edgespec.tune.costs import MeasuredCosts
from edgespec.tune.run import QUICK, Run
from edgespec.tune.samples import Samples
from edgespec.tune.together import Together, measure_together, plans_by_texts
from profiles.cost import Curve, GrowthCost, StepCosts
from profiles.measure import Repeats
from profiles.schema import TemperaturePlan
from profiles.tuner import TreeSample, plain_plan, predict
from tests.profiles.test_tuner import entrant

KEY = ("adaptive", "coupled")
GROWTH = GrowthCost(base_s=0.0, layer_s=1e-4, node_s=1e-6, rows_per_inner=1.0)
ALONE = StepCosts(
    verify=Curve((0.0, 32.0), (0.5, 0.6)), draft=Curve((1.0,), (1e-4,)), rest_s=1e-3, plain_step_s=0.501
)  # fmt: skip


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with Engine.from_pair(open_pair(None, None), tree=TreeSettings(size=64), self_check=False) as engine:
        prompts = [engine.encode("def read_lines(path):\n    "), engine.encode("import os\n")]
        yield Run(engine=engine, prompts=prompts, temperatures=(0.8,), effort=QUICK)


def test_steps_are_timed_without_trees_and_with_small_ones_for_as_many_texts_as_fit(run: Run) -> None:
    found = measure_together(run, default_acceptance(), pass_s=0.01)
    assert set(found) == {4, 16}
    for num_texts, timed in found.items():
        nodes = list(timed)
        assert nodes[0] == 0
        assert all(0 < count <= 8 * num_texts for count in nodes[1:])
        assert all(len(repeats.seconds) <= 3 and min(repeats.seconds) > 0 for repeats in timed.values())
    assert len(found[4]) == 2
    assert len(found[16]) == 1, "128 nodes are more than memory was planned for"


def test_where_passes_are_long_less_is_timed(run: Run) -> None:
    found = measure_together(run, default_acceptance(), pass_s=2.0)
    assert set(found) == {8}


def plan_for(samples: list[TreeSample], together: Together, *, factor: float) -> TemperaturePlan:
    one = entrant(samples=samples, draw="coupled", growth=GROWTH)
    best = predict(one, ALONE, size=16, depth=6)
    plan = TemperaturePlan(
        temperature=0.8, best=replace(best, tokens=factor * best.tokens), plain=plain_plan(ALONE), why="measured"
    )
    costs = MeasuredCosts(verify={}, draft={}, growth={KEY: GROWTH}, size=32, steps=ALONE)
    run = Run(engine=None, prompts=[], temperatures=(0.8,), effort=QUICK)  # type: ignore[arg-type]
    found = plans_by_texts(run, costs, together, Samples(trees={KEY: samples}), plan)  # type: ignore[arg-type]
    return replace(plan, by_texts=found)


def test_each_number_of_texts_has_the_trees_that_pay_there() -> None:
    samples = list(entrant().samples)
    free = {0: Repeats((0.5,)), 128: Repeats((0.6,))}
    dear = {0: Repeats((0.5,)), 128: Repeats((50.0,))}
    plan = plan_for(samples, {4: free, 16: dear}, factor=0.9)
    few, many = plan.by_texts
    assert (few.num_texts, many.num_texts) == (4, 16)
    assert few.nodes > 0
    assert (many.policy, many.tokens_per_s) == ("none", pytest.approx(16 / 0.5))
    exact = predict(entrant(samples=samples, draw="coupled", growth=GROWTH), ALONE, size=few.size, depth=few.depth,
                    threshold=few.threshold)  # fmt: skip
    assert few.tokens == pytest.approx(0.9 * exact.tokens), "trials say what predictions are worth"
