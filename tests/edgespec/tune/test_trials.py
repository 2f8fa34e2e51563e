"""Trials: what is decided by the seconds that real steps took, and by the tokens they yielded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.config import SamplingSettings
from edgespec.grow.acceptance import AcceptanceModel, default_acceptance
from edgespec.tune import trials
from edgespec.tune.run import QUICK, Run
from profiles.schema import Plan, TemperaturePlan
from profiles.tuner import Choice
from tests.profiles.examples import PLAIN, example_plan

NO_ENGINE: Any = None  # nothing is decoded
RUN = Run(engine=NO_ENGINE, prompts=[[number] for number in range(24)], temperatures=[0.8], effort=QUICK)


def tried(
    monkeypatch: pytest.MonkeyPatch,
    seconds: dict[str | int, float],
    *plans: Plan,
    tokens: int = 4,
    num_tried: int = 6,
    **choice: Any,
) -> Any:
    """The plan of trials in which steps of each policy, or size, take so many seconds and yield so many tokens."""

    def decode(_run: Run, found: Any, _model: AcceptanceModel, _temperature: float, _budget_s: float, **_: Any) -> int:
        for trial in found:
            trial.seconds += [[seconds.get(trial.plan.size) or seconds[trial.plan.policy]] * 6] * 2
            trial.tokens += [1 if trial.plan.policy == "none" else tokens] * 12
        return num_tried

    monkeypatch.setattr(trials, "_decode_in_turn", decode)
    ranked = tuple(sorted(plans, key=lambda plan: -plan.tokens_per_s))
    made = Choice(**{"best": ranked[0], "runner_up": None, "plain": PLAIN, "by_size": (), "ranked": ranked, **choice})
    return trials.try_plans(RUN, made, default_acceptance(), temperature=0.8, num_texts=6)


def decoded(
    monkeypatch: pytest.MonkeyPatch, steps: Any, plan: Plan, *, prompts: Sequence[list[int]], plain: Plan = PLAIN
) -> TemperaturePlan:
    """The plan of trials on these prompts whose real steps are `steps`."""
    monkeypatch.setattr(trials, "run_steps", steps)
    choice = Choice(best=plan, runner_up=None, plain=plain, by_size=(), ranked=(plan,))
    engine: Any = SimpleNamespace(pair=SimpleNamespace(default_sampling=SamplingSettings))
    run = replace(RUN, engine=engine, prompts=prompts)
    return trials.try_plans(run, choice, default_acceptance(), temperature=0.8, num_texts=3)


def predicted(policy: str, step_s: float, **changes: Any) -> Plan:
    return example_plan(policy, step_s=step_s, measured_step_s=None, **changes)


def test_the_fastest_in_real_steps_is_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = predicted("adaptive", 0.80), predicted("sequoia", 0.85)
    found = tried(monkeypatch, {"adaptive": 1.2, "sequoia": 1.0, "none": 1.0}, *plans)
    assert (found.best.policy, found.best.measured_step_s, found.best.tokens) == ("sequoia", 1.0, 4.0)
    assert found.runner_up.policy == "adaptive"
    assert "4 times plain decoding" in found.why


def test_what_is_predicted_far_behind_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = predicted("adaptive", 0.8), predicted("chain", 1.0)
    found = tried(monkeypatch, {"adaptive": 1.0, "none": 1.0}, *plans)
    assert found.runner_up.policy == "none"


@pytest.mark.parametrize(("half_s", "size", "is_faster"), [(0.90, 64, True), (0.88, 32, False), (0.80, 32, True)])
def test_half_the_nodes_are_tried_and_taken_unless_they_are_clearly_slower(
    half_s: float, size: int, is_faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where computing begins to take longer than the link, sooner than was measured before."""
    large = predicted("adaptive", 0.8, size=64, nodes=64.0, tokens=4.6)
    half = predicted("adaptive", 0.8, size=32, nodes=32.0, tokens=4.0)
    found = tried(monkeypatch, {64: 1.0, 32: half_s, "none": 1.0}, large, smaller=half)
    assert found.best.size == size
    assert {found.best.size, found.runner_up.size} == {64, 32}
    assert ("; next: adaptive" if is_faster else "; hardly faster: adaptive") in found.why


@pytest.mark.parametrize(("step_s", "policy"), [(0.005, "mcsd"), (0.5, "adaptive")])
def test_more_policies_are_tried_where_steps_are_fast(
    step_s: float, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that is predicted fourth turns out the fastest."""
    seconds = {"adaptive": 1.0, "dyspec": 1.0, "sequoia": 1.0, "mcsd": 0.8, "none": 9.0}
    plans = [
        predicted(name, step_s * (1 + 0.01 * place))
        for place, name in enumerate(("adaptive", "dyspec", "sequoia", "mcsd"))
    ]
    assert tried(monkeypatch, seconds, *plans).best.policy == policy


def test_speculation_that_turns_out_slower_is_switched_off_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    found = tried(monkeypatch, {"adaptive": 8.0, "none": 1.0}, predicted("adaptive", 0.8))
    assert (found.best.policy, found.best.tokens_per_s) == ("none", 1.0)
    assert "adaptive would give 0.5 tokens/s, plain 1;" in found.why


@pytest.mark.parametrize(("gain", "policy"), [(1.005, "none"), (1.02, "adaptive")])
def test_a_small_gain_is_taken_and_one_that_may_be_chance_is_not(
    gain: float, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = tried(monkeypatch, {"adaptive": 4 / gain, "none": 1.0}, predicted("adaptive", 0.8))
    assert found.best.policy == policy
    assert ("hardly faster than plain" in found.why) == (policy == "none")


@pytest.mark.parametrize(
    ("noise", "gain", "policy"),
    [(0.01, 1.025, "adaptive"), (0.10, 1.025, "none"), (0.10, 1.05, "adaptive"), (0.50, 1.05, "adaptive")],
    ids=["quiet", "noisy", "noisy, a larger gain", "very noisy, and a gain that is not given up"],
)
def test_the_noisier_the_machine_the_more_a_tree_must_gain(
    noise: float, gain: float, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 16 prompts; twice the standard error of the trees' seconds over plain decoding's, next to them."""
    monkeypatch.setattr(trials, "PATIENCE", 0.0)

    def decode(_run: Run, found: Any, *_: object, **__: object) -> int:
        for number in range(16):
            sign = 1 if number % 2 else -1
            found[0].seconds.append([(1 + sign * noise) * 4 / gain] * 3)
            found[1].seconds.append([1.0] * 3)
            found[0].tokens += [4] * 3
            found[1].tokens += [1] * 3
        return 16

    monkeypatch.setattr(trials, "_decode_in_turn", decode)
    plan = predicted("adaptive", 0.8)
    choice = Choice(best=plan, runner_up=None, plain=PLAIN, by_size=(), ranked=(plan,))
    assert trials.try_plans(RUN, choice, default_acceptance(), temperature=0.8, num_texts=6).best.policy == policy


def test_a_machine_whose_speed_changes_is_no_noise_if_all_of_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(_run: Run, found: Any, *_: object, **__: object) -> int:
        for slow in (1.0, 3.0) * 4:
            found[0].seconds.append([slow * 4 / 1.02])
            found[1].seconds.append([slow])
            found[0].tokens.append(4)
            found[1].tokens.append(1)
        return 8

    monkeypatch.setattr(trials, "_decode_in_turn", decode)
    plan = predicted("adaptive", 0.8)
    choice = Choice(best=plan, runner_up=None, plain=PLAIN, by_size=(), ranked=(plan,))
    found = trials.try_plans(RUN, choice, default_acceptance(), temperature=0.8, num_texts=6)
    assert found.best.policy == "adaptive"


def test_fewer_nodes_are_not_taken_where_they_are_no_faster_than_plain_decoding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    large = predicted("adaptive", 0.8, size=64, nodes=64.0)
    half = predicted("adaptive", 0.8, size=32, nodes=32.0)
    found = tried(monkeypatch, {64: 4 / 1.02, 32: 4 / 1.005, "none": 1.0}, large, smaller=half)
    assert (found.best.size, found.runner_up.size) == (64, 32)


def test_tokens_of_the_trials_count_with_those_of_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = predicted("adaptive", 0.8, tokens=2.0, nodes=1.0), predicted("adaptive", 0.8, tokens=1.2)
    found = tried(monkeypatch, {"adaptive": 1.0, "none": 1.0}, predicted("adaptive", 0.8), tokens=6, by_size=sizes)
    assert found.best.tokens == pytest.approx(5.0)  # 4 in samples of six texts, 6 in trials on as many
    assert [plan.tokens for plan in found.by_size] == pytest.approx([2.0, 1.5]), "one node yields at most two tokens"


def test_the_first_step_behind_a_prompt_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds the caches as another candidate left them, which costs a short step more than a long one."""

    def steps(_engine: Any, _ids: Any, policy: Any, *, steps: int, **_options: Any) -> list[Any]:
        tokens, step_s = ([7], 0.5) if policy.settings.policy == "none" else ([7] * 4, 1.0)
        found = [SimpleNamespace(tokens=tokens, total_s=step_s) for _ in range(steps)]
        found[0].total_s += 1.0
        return found

    found = decoded(monkeypatch, steps, predicted("adaptive", 1.0), prompts=[[1], [2], [3]])
    assert (found.best.measured_step_s, found.plain.measured_step_s) == (1.0, 0.5)
    assert found.best.tokens == 4


@pytest.mark.parametrize(
    ("step_s", "num_steps"),
    [
        (1e-4, trials.WARM_STEPS + trials.STEPS[1]),  # a row of one policy's steps is long enough then
        (0.0099, 21),  # of both: 24 prompts, the passes over them included, take the 15 seconds
        (0.5, trials.WARM_STEPS + trials.STEPS[0]),  # not all prompts have their turn
    ],
)
def test_rows_of_steps_are_as_long_as_lets_all_prompts_have_their_turn(
    step_s: float, num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def steps(_engine: Any, ids: Any, _policy: Any, *, steps: int, **_options: Any) -> list[Any]:
        asked.append((ids[0], steps))
        return [SimpleNamespace(tokens=[7], total_s=step_s)] * steps

    plan, plain = predicted("adaptive", 1.5 * step_s), replace(PLAIN, step_s=step_s)
    decoded(monkeypatch, steps, plan, plain=plain, prompts=RUN.prompts)
    assert {found for _, found in asked} == {num_steps}
    assert [number for number, _ in asked] == [number for number in range(24) for _ in range(2)]


def test_trials_on_few_texts_count_little_however_many_steps_they_took(monkeypatch: pytest.MonkeyPatch) -> None:
    found = tried(monkeypatch, {"adaptive": 1.0, "none": 1.0}, predicted("adaptive", 0.8), tokens=6, num_tried=2)
    assert found.best.tokens == pytest.approx(4.5)


class Bench:
    """Steps of policies in turn at 8 prompts, which take all the time, on a machine whose speed changes then."""

    def __init__(self, seconds: dict[str, float], *, noise: float, slow: tuple[float, ...] = (1.0,) * 9) -> None:
        self.seconds, self.noise, self.slow = seconds, noise, slow
        self.turns: list[list[str]] = []  # policies
        self.firsts: list[int] = []  # prompts
        self.now_s = 0.0

    def decode(
        self, _run: Run, found: Any, _model: AcceptanceModel, _temperature: float, budget_s: float, *, first: int
    ) -> int:
        slow = self.slow[len(self.turns)]
        self.turns.append([trial.plan.policy for trial in found])
        self.firsts.append(first)
        self.now_s += budget_s
        for number in range(8):
            for trial in found:
                sign = 0 if trial.plan.policy == "none" else (-1) ** number
                trial.seconds.append([slow * (1 + sign * self.noise) * self.seconds[trial.plan.policy]])
                trial.tokens.append(1 if trial.plan.policy == "none" else 4)
        return 8

    def choose(self, monkeypatch: pytest.MonkeyPatch, *policies: str) -> Any:
        monkeypatch.setattr(trials, "_decode_in_turn", self.decode)
        monkeypatch.setattr(trials, "time", SimpleNamespace(perf_counter=lambda: self.now_s))
        plans = tuple(predicted(policy, 0.8) for policy in policies)
        choice = Choice(best=plans[0], runner_up=None, plain=PLAIN, by_size=(), ranked=plans)
        return trials.try_plans(RUN, choice, default_acceptance(), temperature=0.8, num_texts=6)


def test_what_noise_leaves_open_is_timed_again_without_those_that_are_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench({"adaptive": 1.0, "dyspec": 1.01, "sequoia": 2.0, "none": 1.0}, noise=0.1)
    assert bench.choose(monkeypatch, "adaptive", "dyspec", "sequoia").best.policy == "adaptive"
    assert bench.turns == [["adaptive", "dyspec", "sequoia", "none"], *[["adaptive", "dyspec", "none"]] * 2]
    assert bench.firsts == [0, 8, 16]


def test_on_a_quiet_machine_nothing_is_timed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench({"adaptive": 1.0, "dyspec": 1.01, "none": 1.0}, noise=0.001)
    bench.choose(monkeypatch, "adaptive", "dyspec")
    assert len(bench.turns) == 1


def test_a_slow_machine_goes_on_with_the_prompts_that_had_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts take more than all the time, and steps vary."""
    asked: list[tuple[int, int]] = []
    row_s = 0.27 * QUICK.trial_s
    monkeypatch.setattr(trials, "time", SimpleNamespace(perf_counter=lambda: len(asked) * row_s))

    def steps(_engine: Any, ids: Any, policy: Any, *, seed: int, **_options: Any) -> list[Any]:
        asked.append((ids[0], seed))
        tokens, step_s = ([7], 0.25) if policy.settings.policy == "none" else ([7] * 6, 0.5 + 0.1 * (ids[0] % 2))
        return [SimpleNamespace(tokens=tokens, total_s=step_s)] * 7

    found = decoded(monkeypatch, steps, predicted("adaptive", 0.5), prompts=[[1], [2], [3]])
    assert asked[::2] == [(1, 0), (2, 1), (3, 2), (1, 3), (2, 4), (3, 5)], "seeds differ where a prompt comes again"
    assert found.best.tokens == pytest.approx(5.0), "4 in samples of three texts, 6 in trials on as many, twice"


def test_who_dropped_out_is_compared_by_the_plain_steps_next_to_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine becomes three times slower then, for those that went on."""
    bench = Bench({"adaptive": 1.0, "dyspec": 1.3, "none": 1.0}, noise=0.1, slow=(1.0, 3.0, 3.0))
    found = bench.choose(monkeypatch, "adaptive", "dyspec")
    assert bench.turns[-1] == ["adaptive", "none"]
    assert found.best.policy == "adaptive"
    assert found.best.tokens_per_s / found.runner_up.tokens_per_s == pytest.approx(1.3)
