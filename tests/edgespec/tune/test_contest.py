"""The contest: who is compared, where, and with trees of what size."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from edgespec import Engine, TreeSettings
from edgespec.grow.acceptance import default_acceptance
from edgespec.pair.pair import open_pair
from edgespec.tree.policies import DRAWS
from edgespec.tune import acceptance, contest
from edgespec.tune.contest import Outcome, hold_contest
from edgespec.tune.costs import MeasuredCosts
from edgespec.tune.entrants import Contender, contenders
from edgespec.tune.run import FULL, QUICK, Run
from profiles import tuner
from profiles.cost import Curve, GrowthCost, StepCosts
from profiles.measure import Repeats

SIZE = 16
TEMPERATURE = 0.8
PROMPTS = (
    "def read_lines(path):\n    ",
    "import os\n\n\nclass Folder:\n",
    "for line in lines:\n    ",
    "try:\n    x = ",
)
FREE = GrowthCost(base_s=0.0, layer_s=0.0, node_s=0.0, rows_per_inner=1.0)


def machine(pass_s: float, node_s: float) -> MeasuredCosts:
    """Costs of a machine that drafts for nothing."""
    counts = (0.0, float(SIZE))
    verify = Curve(counts, (pass_s, pass_s + SIZE * node_s))
    return MeasuredCosts(
        verify={int(count): Repeats((float(verify(count)),)) for count in counts},
        draft={},
        growth={contender.key: FREE for contender in contenders(size=SIZE, depth=SIZE)},
        size=SIZE,
        steps=StepCosts(verify=verify, draft=Curve((1.0,), (1e-6,)), rest_s=1e-6, plain_step_s=pass_s),
    )


@dataclass(frozen=True)
class Held:
    """A contest, and what was sampled in each of its stages."""

    outcome: Outcome
    stages: dict[str, list[tuple[tuple[int, ...], list[Contender], int]]]  # text, contenders, seed

    def policies(self, stage: str, visit: int) -> set[str]:
        return {one.settings.policy for one in self.stages[stage][visit][1]}

    def size(self, stage: str, visit: int) -> int:
        """The largest tree."""
        return max(one.settings.size for one in self.stages[stage][visit][1] if one.is_nested)

    def prompts(self, run: Run, stage: str) -> list[int]:
        """That were continued, in order."""
        return [
            next(number for number, ids in enumerate(run.prompts) if text[: len(ids)] == tuple(ids))
            for text, _, _ in self.stages[stage]
        ]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    tree = TreeSettings(policy="opt-tree", size=SIZE)
    with Engine.from_pair(open_pair(None, None), tree=tree, context_tokens=256, self_check=False) as engine:
        prompts = [engine.encode(prompt) for prompt in PROMPTS]
        yield Run(engine=engine, prompts=prompts, temperatures=[TEMPERATURE], effort=QUICK)


@pytest.fixture
def hold(run: Run, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Hold a contest that ends when all prompts had their turn twice."""
    stages: dict[str, list[tuple[tuple[int, ...], list[Contender], int]]] = {}
    names: list[str] = []
    right, right_visits = contest.sample_text, contest._visits

    def remember(engine: Engine, ids: Any, contending: Any, *arguments: Any, **options: Any) -> list[int]:
        stages[names[-1]].append((tuple(ids), list(contending), options["seed"]))
        return right(engine, ids, contending, *arguments, **options)

    def visits(*arguments: Any) -> Any:
        names.append("learning" if not names else "comparing")
        stages[names[-1]] = []
        return right_visits(*arguments)

    monkeypatch.setattr(contest, "sample_text", remember)
    monkeypatch.setattr(contest, "_visits", visits)
    monkeypatch.setattr(contest, "TEXT_STEPS", 2)
    monkeypatch.setattr(contest, "FEWEST", 2)

    def held(costs: MeasuredCosts, *, budget_s: float = 600, **changes: Any) -> Held:
        stages.clear()
        names.clear()
        until_s = time.perf_counter() + budget_s
        outcome = hold_contest(replace(run, **changes), costs, default_acceptance(), until_s=until_s)
        return Held(outcome, dict(stages))

    return held


def test_adaptive_trees_teach_acceptance_at_each_prompt_then_everybody_is_compared(run: Run, hold: Any) -> None:
    held = hold(machine(1.0, 0.0))
    assert held.prompts(run, "learning") == [0, 1, 2, 3]
    assert held.policies("learning", 0) == {"adaptive"}
    assert held.prompts(run, "comparing") == [0, 1, 2, 3] * 2
    assert {"adaptive", "opt-tree", "eagle2", "c2t", "sequoia", "chain", "mcsd"} <= held.policies("comparing", 0)
    assert held.outcome.samples[TEMPERATURE].num_texts == 4


def test_a_profile_never_changes_what_a_seed_gives(hold: Any) -> None:
    held = hold(machine(1.0, 0.0), budget_s=0)
    assert {one.draw for one in held.stages["comparing"][0][1]} == {"coupled"}


def test_greedy_texts_are_the_same_with_everybody(hold: Any) -> None:
    held = hold(machine(1.0, 0.0), budget_s=0, temperatures=[0.0])
    assert {one.draw for one in held.stages["comparing"][0][1]} == set(DRAWS)
    assert "dyspec" in held.policies("comparing", 0)


def test_what_was_fitted_is_compared_at_other_prompts_first(
    run: Run, hold: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contest, "fitted", lambda _records, seed: None)
    held = hold(machine(1.0, 0.0), effort=replace(FULL, steps_per_prompt=1))
    assert held.prompts(run, "learning") == [0, 1]
    assert held.prompts(run, "comparing")[:4] == [2, 3, 0, 1]


def test_each_text_goes_on_with_other_luck_than_it_was_learned_at(run: Run, hold: Any) -> None:
    held = hold(machine(1.0, 0.0))
    (first, _, learned), (again, _, seed) = held.stages["learning"][0], held.stages["comparing"][0]
    later, _, later_seed = held.stages["comparing"][4]
    assert first == again == later[: len(first)]
    assert len(later) > len(again)
    assert len({learned, seed, later_seed}) == 3


def test_where_computing_decides_trees_become_small(hold: Any) -> None:
    held = hold(machine(0.01, 0.05))
    assert held.size("learning", 0) == SIZE
    assert held.size("comparing", -1) < SIZE


def test_where_the_link_decides_small_shapes_fall_behind_and_trees_stay_large_and_deep(
    hold: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuner, "DEEPER", 0.2)  # of few places: which depth looks best is chance
    held = hold(machine(1.0, 0.0))
    assert held.size("comparing", -1) == SIZE
    choice = held.outcome.choices[TEMPERATURE]
    assert choice.best.nodes > SIZE / 2
    assert choice.smaller is not None
    assert all(plan.depth == plan.size for plan in (choice.ranked[0], choice.smaller))


def test_who_has_no_plan_left_is_not_grown_further_and_larger_trees_of_before_count_as_small_ones(
    hold: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def left(contending: list[Contender], *_: object) -> dict[tuple[str, str], int]:
        nodes = 4 if len(contending) > 1 else SIZE  # adaptive trees are not all there are
        return {one.key: nodes for one in contending if one.settings.policy in {"opt-tree", "adaptive"}}

    monkeypatch.setattr(contest, "_left", left)
    held = hold(machine(1.0, 0.0))
    assert (held.size("comparing", 0), held.size("comparing", 2)) == (SIZE, 4)
    assert len(held.policies("comparing", 1)) > 2
    assert held.policies("comparing", 2) == {"adaptive", "opt-tree"}, "behind two prompts"
    trees = held.outcome.samples[TEMPERATURE].trees["opt-tree", "coupled"]
    assert (len(trees), max(len(tree.scores) for tree in trees)) == (8, 4)


def test_the_guide_goes_on_though_it_is_behind(hold: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its records are what the acceptance model is judged by, and it is what others have to beat in real steps."""
    monkeypatch.setattr(contest, "_left", lambda *_: {("opt-tree", "coupled"): 4})
    held = hold(machine(1.0, 0.0))
    assert held.policies("comparing", -1) == {"adaptive", "opt-tree"}
    assert {plan.policy for plan in held.outcome.choices[TEMPERATURE].ranked} == {"adaptive"}


def test_few_texts_choose_the_guide_unless_another_is_clearly_faster(
    hold: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = hold(machine(1.0, 0.0), budget_s=0).outcome.choices[TEMPERATURE]
    assert {plan.policy for plan in found.ranked} == {"adaptive"}

    def faster(speeds: Any, than: int, _rule: Any) -> Any:
        return (speeds.measured > speeds.measured[than]).nonzero()[0]

    monkeypatch.setattr(contest, "clearly_faster", faster)
    by_luck = hold(machine(1.0, 0.0), budget_s=0).outcome.choices[TEMPERATURE]
    assert {"adaptive"} < {plan.policy for plan in by_luck.ranked}
    assert by_luck.best.policy != "adaptive", "of two texts"


def test_without_time_two_prompts_are_compared(run: Run, hold: Any) -> None:
    held = hold(machine(1.0, 0.0), budget_s=0)
    assert held.prompts(run, "learning") == [0, 1]
    assert held.prompts(run, "comparing") == [2, 3]
    assert held.size("comparing", 0) == 2, "as small as there are"


def test_one_prompt_does_for_everything(run: Run, hold: Any) -> None:
    held = hold(machine(1.0, 0.0), prompts=run.prompts[:1])
    assert (held.prompts(run, "learning"), held.prompts(run, "comparing")) == ([0], [0, 0])
    assert held.outcome.choices[TEMPERATURE].best.tokens > 1


def test_a_model_of_the_pairs_own_is_fitted_to_what_was_seen_behind_whole_prompts(
    run: Run, hold: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contest, "FIT_PLACES", 1)
    monkeypatch.setattr(acceptance, "FIT_STEPS", 3)
    held = hold(machine(1.0, 0.0), effort=replace(FULL, steps_per_prompt=1))
    model, default = held.outcome.model, default_acceptance()
    assert not torch.equal(model.candidate.mean, default.candidate.mean), "of these records"
    assert {found.temperature for found in model.measured} == {TEMPERATURE}
    for records in held.outcome.samples[TEMPERATURE].records:
        assert records["prompt"].shape == records["taken"].shape
        assert records["prompt"].unique().numel() == 1
