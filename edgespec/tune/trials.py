"""The last stage: the best plans decode the prompts for real, in turn, and the fastest is taken."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from edgespec.grow.acceptance import AcceptanceModel
from edgespec.grow.policies import open_policy
from edgespec.profiled import tree_settings
from edgespec.tune.run import Run
from edgespec.tune.timings import run_steps
from profiles.schema import Plan, TemperaturePlan
from profiles.tuner import Choice, with_tokens

NUM_CANDIDATES = (3, 8)  # policies, more where steps are fast, beside a smaller tree of the first and plain decoding
NUM_PROMPTS = 8  # that there should be time for
STEPS = (6, 24)  # of one candidate at one prompt, that are timed: as many as let all prompts have their turn
PROMPT_STEPS = 4  # about as long as the passes over a prompt
WARM_STEPS = 1  # before them: behind another candidate's steps, caches and read-ahead are that one's
MIN_PROMPTS = 2
MARGIN = 0.02  # that a plan must be faster by than one with fewer nodes
PLAIN_MARGINS = (0.01, 0.04)  # than plain decoding, as the noise asks for: more would give up gains that are real
CERTAIN = 2.0  # standard errors
PRECISE = 0.01  # that no more steps are timed for
PATIENCE = 2.5  # times the time that there is: then no more prompts are taken, if it is not decided before
CLOSE = 0.9  # of the fastest prediction: what is slower is not tried


@dataclass(slots=True)
class _Trial:
    plan: Plan
    seconds: list[list[float]] = field(default_factory=list)  # of each step that is timed, by prompt
    tokens: list[int] = field(default_factory=list)

    def step_s(self, plain: _Trial) -> float:
        """What its steps took, next to plain decoding's, which went on for as long as anybody did."""
        next_to = statistics.fmean(itertools.chain(*plain.seconds[: len(self.seconds)]))
        all_plain = statistics.fmean(itertools.chain(*plain.seconds))
        return statistics.fmean(itertools.chain(*self.seconds)) * all_plain / next_to

    def error(self, plain: _Trial) -> float:
        """Relative standard error of these seconds."""
        beside = plain.seconds[: len(self.seconds)]
        ratios = [statistics.fmean(own) / statistics.fmean(its) for own, its in zip(self.seconds, beside, strict=True)]
        if len(ratios) < 2:
            return 0.0
        return statistics.stdev(ratios) / statistics.fmean(ratios) / math.sqrt(len(ratios))


def try_plans(
    run: Run, choice: Choice, model: AcceptanceModel, *, temperature: float, num_texts: int
) -> TemperaturePlan:
    """The fastest of the predicted best, by the seconds that their steps really take.

    Which plan yields more tokens is known from trees of each at the same places of `num_texts` texts. How many
    they yield on the whole, the trials tell as well: they add texts.
    """
    fastest = choice.ranked[0]
    budget_s = run.effort.trial_s / len(run.temperatures)
    count = int(budget_s / (NUM_PROMPTS * (WARM_STEPS + STEPS[0]) * fastest.step_s))
    count = min(max(count, NUM_CANDIDATES[0]), NUM_CANDIDATES[1])
    near = [plan for plan in choice.ranked[:count] if plan.tokens_per_s >= CLOSE * fastest.tokens_per_s]
    smaller = [choice.smaller] if choice.smaller is not None else []
    trials = [_Trial(plan) for plan in (*near, *smaller, choice.plain)]
    started = time.perf_counter()
    close, num_tried = trials, 0
    while True:
        num_tried += _decode_in_turn(run, close, model, temperature, budget_s, first=num_tried)
        close = _undecided(close)
        if len(close) < 2 or time.perf_counter() - started > PATIENCE * budget_s:
            break
    factor = _token_factor(trials[:-1], min(num_tried, len(run.prompts)), num_texts)
    *speculating, plain = _measured(trials)
    errors = [trial.error(trials[-1]) for trial in trials[:-1]]
    ranked = _ranked([_scaled(plan, factor) for plan in speculating], plain, errors)
    return TemperaturePlan(
        temperature=temperature,
        best=ranked[0],
        plain=plain,
        runner_up=ranked[1],
        why=_why(ranked, plain),
        by_size=tuple(_scaled(plan, factor) for plan in choice.by_size),
    )


def _measured(trials: Sequence[_Trial]) -> list[Plan]:
    """The plans with what their steps took; plain decoding is the last."""
    return [replace(trial.plan, measured_step_s=trial.step_s(trials[-1])) for trial in trials]


def _undecided(trials: Sequence[_Trial]) -> list[_Trial]:
    """Those that may be the fastest, as far as their noise tells, with plain decoding as the last."""
    plain = trials[-1]
    speeds = [plan.tokens_per_s for plan in _measured(trials)]
    errors = [trial.error(plain) for trial in trials]
    fastest = max(range(len(trials)), key=lambda index: speeds[index])
    return [
        trial
        for trial, speed, error in zip(trials, speeds, errors, strict=True)
        if trial is plain
        or (
            max(error, errors[fastest]) > PRECISE
            and speed * (1 + CERTAIN * max(error, errors[fastest])) >= speeds[fastest]
        )
    ]


def _ranked(speculating: Sequence[Plan], plain: Plan, errors: Sequence[float]) -> list[Plan]:
    """The plan to take, and the others, fastest first.

    Within the noise of the trials fewer nodes are the safer choice: where computing becomes the slower part, at
    some number of nodes, changes with what else the machine does. A tree must be faster than none all the same,
    by more the noisier the machine is: `errors` are relative standard errors of the trees' speeds over none's.
    """
    ranked = sorted([*speculating, plain], key=lambda plan: plan.tokens_per_s, reverse=True)
    least, most = PLAIN_MARGINS
    alike_from = ranked[0].tokens_per_s / (1 + MARGIN)
    paying = [
        plan
        for plan, error in zip(speculating, errors, strict=True)
        if plan.tokens_per_s >= plain.tokens_per_s * (1 + min(max(least, CERTAIN * error), most))
        and plan.tokens_per_s >= alike_from
    ]
    safest = min(paying, key=lambda plan: plan.nodes, default=plain)
    return [safest, *(plan for plan in ranked if plan is not safest)]


def _token_factor(trials: Sequence[_Trial], num_tried: int, num_texts: int) -> float:
    """Tokens a pass over those that were predicted, samples and trials together.

    Each counts by its texts: texts differ more than places in one.
    """
    found = sum(sum(trial.tokens) for trial in trials)
    predicted = sum(trial.plan.tokens * len(trial.tokens) for trial in trials)
    return (num_texts + num_tried * found / predicted) / (num_texts + num_tried)


def _scaled(plan: Plan, factor: float) -> Plan:
    """The plan with so many times the tokens."""
    return with_tokens(plan, factor * plan.tokens)


def _decode_in_turn(
    run: Run, trials: Sequence[_Trial], model: AcceptanceModel, temperature: float, budget_s: float, *, first: int
) -> int:
    """Real steps of all, prompt by prompt from the `first` on, until the time for them is spent, or all prompts had
    their turn; how many that were.
    """
    sampling = run.sampling(temperature)
    count = int(budget_s / (len(run.prompts) * sum(trial.plan.step_s for trial in trials))) - PROMPT_STEPS
    count = min(max(count, WARM_STEPS + STEPS[0]), WARM_STEPS + STEPS[1])
    started = time.perf_counter()
    for done in range(len(run.prompts)):
        index = first + done
        ids = run.prompts[index % len(run.prompts)]
        for trial in trials if index % 2 == 0 else reversed(trials):
            policy = open_policy(tree_settings(trial.plan)).with_acceptance(model)
            steps = run_steps(run.engine, ids, policy, sampling=sampling, steps=count, seed=run.seed + index)
            trial.seconds.append([step.total_s for step in steps[WARM_STEPS:]])
            trial.tokens += [len(step.tokens) for step in steps]
        if done + 1 >= MIN_PROMPTS and time.perf_counter() - started > budget_s:
            return done + 1
    return len(run.prompts)


def _why(ranked: Sequence[Plan], plain: Plan) -> str:
    """The decision in one sentence, with its numbers."""
    best, second = ranked[0], ranked[1]
    if best.policy == "none":
        return (
            f"speculation is {_slower(second, plain)} than plain decoding here: {second.policy} would give "
            f"{second.tokens_per_s:.3g} tokens/s, plain {best.tokens_per_s:.3g}; it is switched off"
        )
    gain = best.tokens_per_s / plain.tokens_per_s
    other = "next" if second.tokens_per_s <= best.tokens_per_s else "hardly faster"
    return (
        f"{best.tokens:.3g} tokens a pass in {1000 * (best.measured_step_s or best.step_s):.3g} ms, "
        f"{gain:.3g} times plain decoding; {other}: {_name(second)} with {second.tokens_per_s:.3g} tokens/s "
        f"against {best.tokens_per_s:.3g}"
    )


def _slower(plan: Plan, plain: Plan) -> str:
    return "slower" if plan.tokens_per_s < plain.tokens_per_s else "hardly faster"


def _name(plan: Plan) -> str:
    return f"{plan.policy} {plan.draw or ''} {plan.size or ''}".strip()
