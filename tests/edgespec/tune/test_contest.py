"""The contest: who is compared, where, and with trees of what size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from edgespec import Engine, TreeSettings
from edgespec.grow.acceptance import default_acceptance
from edgespec.pair.pair import open_pair
from edgespec.tune import contest
from edgespec.tune.contest import Outcome, hold_contest
from edgespec.tune.costs import MeasuredCosts
from edgespec.tune.entrants import Contender, contenders
from edgespec.tune.run import Effort, Run
from profiles import tuner
from profiles.cost import Curve, GrowthCost, StepCosts
from profiles.measure import Repeats

SIZE = 16
TEMPERATURE = 0.8
PROMPTS = ("def read_lines(path):\n    ", "import os\n\n\nclass Folder:\n", "for line in lines:\n    ")
NO_HURRY = Effort(timing_s=0, sampling_s=600, steps_per_prompt=1, trial_s=0, fits_acceptance=False)
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
    stages: list[list[tuple[tuple[int, ...], list[Contender], int]]]  # text, contenders, seed

    def sizes(self, stage: int) -> set[int]:
        return {one.settings.size for _, found, _ in self.stages[stage] for one in found if one.is_nested}

    def prompts(self, run: Run, stage: int) -> list[int]:
        texts = [text for text, _, _ in self.stages[stage]]
        return [
            number for number, ids in enumerate(run.prompts) if any(text[: len(ids)] == tuple(ids) for text in texts)
        ]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    tree = TreeSettings(policy="opt-tree", size=SIZE)
    with Engine.from_pair(open_pair(None, None), tree=tree, context_tokens=256, self_check=False) as engine:
        prompts = [engine.encode(prompt) for prompt in PROMPTS]
        yield Run(engine=engine, prompts=prompts, temperatures=[TEMPERATURE], effort=NO_HURRY)


@pytest.fixture
def hold(run: Run, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Hold a contest that ends when all prompts had their turn once."""
    sampled: list[tuple[tuple[int, ...], list[Contender], int]] = []
    right = contest.sample_text

    def remember(engine: Engine, ids: Any, contending: Any, *arguments: Any, **options: Any) -> list[int]:
        sampled.append((tuple(ids), list(contending), options["seed"]))
        return right(engine, ids, contending, *arguments, **options)

    monkeypatch.setattr(contest, "sample_text", remember)
    monkeypatch.setattr(contest, "MAX_ROUNDS", 1)
    monkeypatch.setattr(contest, "FEWEST", 2)

    def held(costs: MeasuredCosts, **changes: Any) -> Held:
        starts: list[int] = []
        names: list[str] = []

        def report(stage: str, _share: float) -> None:
            if stage not in names:
                names.append(stage)
                starts.append(len(sampled) - 1)

        outcome = hold_contest(replace(run, report=report, **changes), costs, default_acceptance())
        ends = [*starts[1:], len(sampled)]
        return Held(outcome, [sampled[start:end] for start, end in zip(starts, ends, strict=True)])

    return held


def test_first_prompts_teach_acceptance_others_compare_and_all_decide(run: Run, hold: Any) -> None:
    held = hold(machine(1.0, 0.0))
    assert [held.prompts(run, stage) for stage in range(3)] == [[0], [1, 2], [0, 1, 2]]
    assert held.outcome.samples[TEMPERATURE].num_texts == 3


def test_where_computing_decides_trees_become_small(hold: Any) -> None:
    held = hold(machine(0.01, 0.01))
    assert held.sizes(0) == {SIZE}
    assert max(held.sizes(2)) < SIZE


def test_larger_trees_of_before_count_as_small_ones(hold: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = iter((8, 4))
    monkeypatch.setattr(contest, "_worth_growing", lambda _near: next(sizes))
    held = hold(machine(0.01, 0.01))
    assert [held.sizes(stage) for stage in range(3)] == [{SIZE}, {8}, {4}]
    nested = {one.key for _, found, _ in held.stages[2] for one in found if one.is_nested}
    for key in nested:
        trees = held.outcome.samples[TEMPERATURE].trees[key]
        assert len(trees) == 5, "at two prompts with larger trees, then at all three"
        assert max(len(tree.scores) for tree in trees) <= 4


def test_where_the_link_decides_trees_stay_large_and_deep(hold: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "DEEPER", 0.2)  # of few places: which depth looks best is chance
    held = hold(machine(1.0, 0.0))
    assert held.sizes(2) == {SIZE}
    choice = held.outcome.choices[TEMPERATURE]
    assert choice.best.nodes > SIZE / 2
    assert choice.smaller is not None
    assert all(plan.depth == plan.size for plan in (choice.ranked[0], choice.smaller))


def test_one_prompt_does_for_everything_and_is_continued_in_several_ways(run: Run, hold: Any) -> None:
    held = hold(machine(1.0, 0.0), prompts=run.prompts[:1])
    assert [held.prompts(run, stage) for stage in range(3)] == [[0], [0], [0]]
    assert held.stages[1][0][2] != held.stages[2][0][2], "the seed"
    assert held.outcome.choices[TEMPERATURE].best.tokens > 1


def test_both_draws_tokens_are_told_by_trees_of_one_size(hold: Any) -> None:
    """Which draw is better follows from them: the small trees of one would lose to the large ones of the other."""
    held = hold(machine(0.01, 0.01))
    trees = held.outcome.samples[TEMPERATURE].trees["adaptive", "sampled"]
    tokens = held.outcome.model.expected_tokens(TEMPERATURE, "without_replacement")
    assert tokens is not None
    assert tokens > sum(tree.tokens for tree in trees) / len(trees) + 0.1, "of small trees"
