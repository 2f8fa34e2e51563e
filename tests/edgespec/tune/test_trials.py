"""Trials: what is decided by the seconds that real steps took, and by the tokens they yielded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.config import SamplingSettings
from edgespec.grow.acceptance import default_acceptance
from edgespec.tune import trials
from edgespec.tune.run import QUICK, Run
from profiles.schema import Plan, TemperaturePlan
from profiles.tuner import Choice
from tests.profiles.examples import PLAIN, example_plan

ENGINE: Any = SimpleNamespace(pair=SimpleNamespace(default_sampling=SamplingSettings))
RUN = Run(engine=ENGINE, prompts=[[number] for number in range(8)], temperatures=[0.8], effort=QUICK)
BUDGET_S = 10_000.0
NUM_TEXTS = 6  # of the samples


def predicted(policy: str, step_s: float = 0.8, **changes: Any) -> Plan:
    return example_plan(policy, step_s=step_s, measured_step_s=None, **changes)


class Bench:
    """A machine on which a step of each policy, or size, takes so long; its clock is that of the trials."""

    def __init__(self, seconds: dict[str | int, float | Callable[[int], float]], *, tokens: int = 4) -> None:
        self.seconds, self.tokens = seconds, tokens
        self.rows: list[list[tuple[int, int, str, int, int]]] = []  # prompt, seed, policy, size, steps of each
        self.now_s = 0.0

    def run_steps(self, _engine: Any, ids: Any, policy: Any, *, steps: int, seed: int, **_options: Any) -> list[Any]:
        if not self.rows or self.rows[-1][0][1] != seed:
            self.rows.append([])
        settings = policy.settings
        self.rows[-1].append((ids[0], seed, settings.policy, settings.size, steps))
        found = self.seconds[settings.size] if settings.size in self.seconds else self.seconds[settings.policy]
        step_s = found(len(self.rows) - 1) if callable(found) else found
        self.now_s += steps * step_s
        tokens = [7] * (1 if settings.policy == "none" else self.tokens)
        warm = SimpleNamespace(tokens=tokens, total_s=step_s + 1.0)  # finds the caches as another plan left them
        return [warm, *[SimpleNamespace(tokens=tokens, total_s=step_s)] * (steps - 1)]

    def turns(self) -> list[list[str]]:
        return [sorted(policy for _, _, policy, _, _ in row) for row in self.rows]

    def choose(
        self, monkeypatch: pytest.MonkeyPatch, *plans: Plan, run: Run = RUN, budget_s: float = BUDGET_S, **changes: Any
    ) -> TemperaturePlan:
        monkeypatch.setattr(trials, "run_steps", self.run_steps)
        monkeypatch.setattr(trials, "time", SimpleNamespace(perf_counter=lambda: self.now_s))
        ranked = tuple(sorted(plans, key=lambda plan: -plan.tokens_per_s))
        choice = Choice(best=ranked[0], runner_up=None, plain=PLAIN, by_size=(), ranked=ranked)
        return trials.try_plans(
            run,
            replace(choice, **changes),
            default_acceptance(),
            temperature=0.8,
            num_texts=NUM_TEXTS,
            budget_s=budget_s,
        )


def uneven(step_s: float, noise: float) -> Callable[[int], float]:
    """Steps that are slower at every other prompt, and faster at those between."""
    return lambda row: step_s * (1 + (noise if row % 2 else -noise))


def test_the_fastest_in_real_steps_is_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = predicted("adaptive", 0.80), predicted("sequoia", 0.85)
    found = Bench({"adaptive": 1.2, "sequoia": 1.0, "none": 1.0}).choose(monkeypatch, *plans)
    assert (found.best.policy, found.best.measured_step_s, found.best.tokens) == ("sequoia", 1.0, 4.0)
    assert found.runner_up is not None
    assert (found.runner_up.policy, found.runner_up.measured_step_s) == ("adaptive", pytest.approx(1.2))
    assert "4 times plain decoding" in found.why


@pytest.mark.parametrize(
    ("budget_s", "tried"), [(10.0, ["adaptive", "none"]), (300.0, ["adaptive", "none", "sequoia"])]
)
def test_only_plans_that_there_is_time_for_are_tried(
    budget_s: float, tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench({"adaptive": 1.0, "sequoia": 1.0, "none": 1.0})
    bench.choose(monkeypatch, predicted("adaptive", 0.8), predicted("sequoia", 0.81), budget_s=budget_s)
    assert bench.turns()[0] == tried


def test_the_guide_is_tried_beside_whatever_was_predicted_to_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = predicted("adaptive", 1.2), predicted("c2t", 0.8), predicted("sequoia", 0.81)
    bench = Bench({"adaptive": 1.0, "c2t": 1.1, "sequoia": 1.1, "none": 1.0})
    found = bench.choose(monkeypatch, *plans, budget_s=10.0)
    assert bench.turns()[0] == ["adaptive", "c2t", "none"]
    assert found.best.policy == "adaptive"


@pytest.mark.parametrize(("half_s", "size", "says"), [(0.99, 32, "not clearly faster"), (0.96, 64, "next")])
def test_half_the_nodes_are_taken_where_they_give_up_no_more_than_the_least_gain(
    half_s: float, size: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where computing becomes the slower part changes with what else the machine does."""
    large = predicted("adaptive", size=64, nodes=64.0)
    half = predicted("adaptive", size=32, nodes=32.0)
    bench = Bench({64: 1.0, 32: 1 / half_s, "none": 9.0})
    found = bench.choose(monkeypatch, large, smaller=half)
    assert found.best.size == size
    assert found.runner_up is not None
    assert {found.best.size, found.runner_up.size} == {64, 32}
    assert f"; {says}: adaptive" in found.why


def test_speculation_that_turns_out_slower_is_switched_off_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Bench({"adaptive": 8.0, "none": 1.0}).choose(monkeypatch, predicted("adaptive"))
    assert (found.best.policy, found.best.tokens_per_s) == ("none", 1.0)
    assert "adaptive would give 0.5 tokens/s, plain 1;" in found.why


@pytest.mark.parametrize(("gain", "policy"), [(1.01, "none"), (1.03, "adaptive")])
def test_a_tree_is_taken_that_gains_more_than_the_least_gain(
    gain: float, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Bench({"adaptive": 4 / gain, "none": 1.0}).choose(monkeypatch, predicted("adaptive"))
    assert found.best.policy == policy
    assert ("hardly faster than plain" in found.why) == (policy == "none")


def test_a_quiet_race_is_decided_at_its_first_look(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench({"adaptive": 1.0, "sequoia": 1.01, "none": 9.0})
    bench.choose(monkeypatch, predicted("adaptive"), predicted("sequoia"))
    assert len(bench.rows) == 2


def test_what_noise_leaves_open_goes_on_without_those_that_are_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench({"adaptive": uneven(1.0, 0.05), "dyspec": uneven(1.0, -0.05), "sequoia": 9.0, "none": 9.0})
    looks = []
    right = trials.still_racing

    def look(*arguments: Any) -> Any:
        looks.append(len(bench.rows))
        return right(*arguments)

    monkeypatch.setattr(trials, "still_racing", look)
    bench.choose(monkeypatch, predicted("adaptive"), predicted("dyspec"), predicted("sequoia"))
    assert looks[:4] == [2, 4, 8, 16], "rows have doubled"
    assert bench.turns()[0] == ["adaptive", "dyspec", "none", "sequoia"]
    assert bench.turns()[-1] == ["adaptive", "dyspec"]
    assert bench.now_s <= BUDGET_S


def test_a_machine_whose_speed_changes_is_no_noise_if_all_of_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(step_s: float) -> Callable[[int], float]:
        return lambda row: step_s * (3.0 if row % 2 else 1.0)

    bench = Bench({"adaptive": slow(4 / 1.03), "none": slow(1.0)})
    assert bench.choose(monkeypatch, predicted("adaptive")).best.policy == "adaptive"
    assert len(bench.rows) == 2


def test_who_dropped_out_is_compared_by_the_best_plans_steps_next_to_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine becomes three times slower then, for those that went on."""

    def later_slow(find: Callable[[int], float]) -> Callable[[int], float]:
        return lambda row: find(row) * (3.0 if row >= 2 else 1.0)

    bench = Bench({
        "adaptive": later_slow(uneven(1.0, 0.05)), "dyspec": later_slow(uneven(1.1, -0.05)), "sequoia": 5.0,
        "none": 4.0,
    })  # fmt: skip
    found = bench.choose(monkeypatch, predicted("adaptive"), predicted("dyspec"), predicted("sequoia"))
    assert bench.turns()[-1] == ["adaptive", "dyspec"]
    assert found.best.policy == "adaptive"
    assert found.best.measured_step_s == pytest.approx(found.plain.measured_step_s * 1.0 / 4.0, rel=0.06)


@pytest.mark.parametrize(
    ("row_s", "num_rows"),
    [(0.01, 8), (0.3, 3), (5.0, 2)],
    ids=["more than enough", "the fourth would take too long", "two at least, which can be compared"],
)
def test_the_time_is_kept_but_for_two_rows(row_s: float, num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is decided here: noise is large. The clock shows a row's time after each."""
    bench = Bench({"adaptive": uneven(1.0, 0.9), "none": uneven(0.25, -0.5)})
    monkeypatch.setattr(trials, "run_steps", bench.run_steps)
    monkeypatch.setattr(trials, "time", SimpleNamespace(perf_counter=lambda: row_s * len(bench.rows)))
    choice = Choice(best=PLAIN, runner_up=None, plain=PLAIN, by_size=(), ranked=(predicted("adaptive"),))
    if row_s < 0.1:
        monkeypatch.setattr(trials, "is_decided", lambda _speeds, _rule: len(bench.rows) == num_rows)
    trials.try_plans(RUN, choice, default_acceptance(), temperature=0.8, num_texts=NUM_TEXTS, budget_s=1.0)
    assert len(bench.rows) == num_rows


def test_tokens_of_the_trials_count_with_those_of_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = predicted("adaptive", tokens=2.0, nodes=1.0), predicted("adaptive", tokens=1.2)
    bench = Bench({"adaptive": 1.0, "none": 1.0}, tokens=6)
    found = bench.choose(monkeypatch, predicted("adaptive"), by_size=sizes)
    factor = (NUM_TEXTS + 2 * 6 / 4) / (NUM_TEXTS + 2)  # 4 in samples of six texts, 6 in trials on two
    assert found.best.tokens == pytest.approx(4 * factor)
    assert [plan.tokens for plan in found.by_size] == pytest.approx([2.0, 1.2 * factor]), "one node: two tokens at most"


@pytest.mark.parametrize(
    ("step_s", "num_steps"),
    [
        (1e-4, 1 + trials.STEPS[1]),
        (0.0149, 19),  # of both: 8 prompts, with what is not timed behind each, take the 5 seconds
        (0.5, 1 + trials.STEPS[0]),  # not all prompts have their turn
    ],
)
def test_rows_of_steps_are_as_long_as_lets_all_prompts_have_their_turn(
    step_s: float, num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench({"adaptive": uneven(step_s, 0.5), "none": uneven(step_s, -0.5)})
    bench.choose(monkeypatch, predicted("adaptive", step_s), plain=replace(PLAIN, step_s=step_s * 0.9), budget_s=5.0)
    assert {steps for row in bench.rows for *_, steps in row} == {num_steps}


def test_prompts_that_come_again_come_with_other_luck_and_every_other_row_runs_backwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench({"adaptive": uneven(1.0, 0.9), "none": uneven(0.25, -0.9)})
    bench.choose(monkeypatch, predicted("adaptive"), run=replace(RUN, prompts=[[1], [2], [3]]))
    assert [row[0][:2] for row in bench.rows[:4]] == [(1, 0), (2, 1), (3, 2), (1, 3)]
    assert [row[0][2] for row in bench.rows[:4]] == ["adaptive", "none", "adaptive", "none"]
