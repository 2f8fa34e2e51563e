"""What is timed, and in what order."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest

from edgespec import Engine, TreeSettings
from edgespec.grow.acceptance import default_acceptance
from edgespec.pair.pair import open_pair
from edgespec.tune import costs
from edgespec.tune.costs import measure_costs
from edgespec.tune.run import QUICK, Run
from profiles import measure
from profiles.measure import Repeats, Task

SLOW = range(2, 4)  # growth in the first sitting, passes in the second


def test_a_machine_that_is_slow_for_a_while_slows_no_part_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = itertools.count()

    def timed(tasks: Mapping[Any, Task], **_: object) -> dict[Any, Repeats]:
        for task in tasks.values():
            task.prepare()
            task.run()
        seconds = 10.0 if next(calls) in SLOW else 1.0
        return {key: Repeats((seconds,)) for key in tasks}

    monkeypatch.setattr(costs, "TAKES_TURNS_S", float("inf"))
    monkeypatch.setattr(measure, "time_interleaved", timed)
    tree = TreeSettings(policy="opt-tree", size=16)
    with Engine.from_pair(open_pair(None, None), tree=tree, self_check=False) as engine:
        run = Run(engine=engine, prompts=[engine.encode("def main(")], temperatures=(0.8,), effort=QUICK)
        found = measure_costs(run, default_acceptance(), budget_s=600)
    assert next(calls) > max(SLOW)
    assert {one.median_s for one in (*found.verify.values(), *found.draft.values())} == {1.0}
    # A tree took as long as one call of the draft: nothing is left for the policy's own work.
    assert {cost.base_s + cost.layer_s + cost.node_s for cost in found.growth.values()} == {0.0}


def test_where_the_time_is_spent_one_sitting_must_do(monkeypatch: pytest.MonkeyPatch) -> None:
    sittings = []
    right = measure.time_interleaved

    def timed(tasks: Mapping[Any, Task], **options: Any) -> dict[Any, Repeats]:
        sittings.append(options["budget_s"])
        return right(tasks, **options)

    monkeypatch.setattr(measure, "time_interleaved", timed)
    with Engine.from_pair(
        open_pair(None, None), tree=TreeSettings(policy="opt-tree", size=4), self_check=False
    ) as engine:
        run = Run(engine=engine, prompts=[engine.encode("def main(")], temperatures=(0.8,), effort=QUICK)
        measure_costs(run, default_acceptance(), budget_s=0)
    assert sittings == [0, 0, 0], "passes, draft calls, growth"
