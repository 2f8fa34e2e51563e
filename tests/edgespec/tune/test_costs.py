"""What is timed, and in what order."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from edgespec import Engine, TreeSettings
from edgespec.grow.acceptance import default_acceptance
from edgespec.pair.pair import open_pair
from edgespec.tune import costs
from edgespec.tune.costs import measure_costs, note_of_others
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


def test_repeats_that_lie_far_apart_are_told_as_other_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of most sizes: one hiccup says nothing. Nobody is told by more than words: a profile has medians and spreads."""
    steady, torn = Repeats((1.0, 1.1, 0.9, 1.0, 1.05)), Repeats((1.0, 2.0, 0.9, 3.0, 1.0))
    assert note_of_others({0: steady, 1: steady, 2: torn}) is None
    note = note_of_others({0: torn, 1: torn, 2: steady})
    assert note is not None
    assert note.startswith("other programs were running: passes over 0 nodes took 1000.0 ms, and 1550.0 ms lie between")
    warned: list[str] = []
    monkeypatch.setattr(costs, "FAR_APART", -1.0)
    monkeypatch.setattr(costs, "SITTINGS", 1)
    tree = TreeSettings(policy="opt-tree", size=4)
    with Engine.from_pair(open_pair(None, None), tree=tree, self_check=False) as engine:
        run = Run(engine=engine, prompts=[engine.encode("def main(")], temperatures=(0.8,), effort=QUICK)
        measure_costs(replace(run, warn=warned.append), default_acceptance(), budget_s=0.1)
    (said,) = warned
    assert "other programs were running: " in said
