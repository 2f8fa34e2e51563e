"""The last stage: the best plans decode the prompts for real, in turn, and the fastest is taken."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from edgespec.grow.acceptance import AcceptanceModel
from edgespec.grow.policies import open_policy
from edgespec.placement.pair_profile import tree_settings
from edgespec.tune.entrants import GUIDE
from edgespec.tune.race import PROMPTS, Rule, Speeds, by_prompt, is_decided, log_speeds, still_racing, winner
from edgespec.tune.run import Run
from edgespec.tune.timings import run_steps
from profiles.cost import Floats
from profiles.schema import Plan, TemperaturePlan
from profiles.tuner import Choice, with_tokens

STEPS = (6, 24)  # of a plan behind a prompt: fewer are outweighed by the prompt's pass, for more there is no room
UNTIMED = 4  # steps' time behind each prompt: its own pass, and a step that finds the caches as another plan left them


@dataclass(slots=True)
class _Trials:
    """Steps of all plans: a row is everybody's behind one prompt."""

    plans: Sequence[Plan]  # the last is plain decoding
    prompts: list[int] = field(default_factory=list)  # of each row
    seconds: list[list[float]] = field(default_factory=list)  # of a step, [rows][plans]; nan of who was dropped before
    tokens: float = 0.0  # that trees yielded
    predicted: float = 0.0  # that they were predicted to

    def factor(self, num_texts: int) -> float:
        """Tokens a pass over those that were predicted, samples of `num_texts` texts and trials together.

        Each counts by its texts: texts differ more than places in one.
        """
        num_tried = len(set(self.prompts))
        return (num_texts + num_tried * self.tokens / self.predicted) / (num_texts + num_tried)

    def speeds(self, racing: Sequence[int], plans: Sequence[Plan], rule: Rule) -> Speeds:
        """Of those that are still in it, by their expected tokens and the seconds of their steps."""
        seconds = np.array(self.seconds)[:, racing]
        tokens = np.broadcast_to([plans[place].tokens for place in racing], seconds.shape)
        return log_speeds(by_prompt(tokens, self.prompts), by_prompt(seconds, self.prompts), rule)

    def measured(self, plans: Sequence[Plan], best: int) -> list[Plan]:
        """The plans with what their steps took, next to the best one's: a machine's speed may change."""
        seconds: Floats = np.array(self.seconds)
        took = ~np.isnan(seconds)
        next_to = np.where(took, seconds[:, [best]], np.nan)
        ratios = np.nansum(seconds, 0) / np.nansum(next_to, 0)
        return [
            replace(plan, measured_step_s=float(ratio * seconds[:, best].mean()))
            for plan, ratio in zip(plans, ratios, strict=True)
        ]


def try_plans(
    run: Run, choice: Choice, model: AcceptanceModel, *, temperature: float, num_texts: int, budget_s: float
) -> TemperaturePlan:
    """The fastest of the predicted best, by the seconds that their steps really take.

    Which plan yields more tokens is known from trees of each at the same places of `num_texts` texts. How many
    they yield on the whole, the trials tell as well: they add texts.
    """
    started, rule = time.perf_counter(), run.effort.rule
    trials = _Trials(_candidates(choice, budget_s))
    racing = list(range(len(trials.plans)))
    steps = _row_steps(trials.plans, len(run.prompts), budget_s)
    look_at, count = 2, 0
    while True:
        _try_behind_next(run, trials, racing, model, temperature, steps=steps)
        count += 1
        is_over = (time.perf_counter() - started) * (count + 1) / count > budget_s
        if count < 2 or (count < look_at and not is_over):
            continue
        look_at *= 2
        factor = trials.factor(num_texts)
        plans = [*(_scaled(plan, factor) for plan in trials.plans[:-1]), trials.plans[-1]]
        racing = [racing[place] for place in still_racing(trials.speeds(racing, plans, rule), rule)]
        speeds = trials.speeds(racing, plans, rule)
        if is_over or is_decided(speeds, rule):
            break
    best = racing[winner(speeds, [plans[place].nodes for place in racing], rule)]
    measured = trials.measured(plans, best)
    others = [place for place in range(len(measured)) if place != best]
    others.sort(key=lambda place: (place not in racing, -measured[place].tokens_per_s))
    ranked = [measured[place] for place in (best, *others)]
    return TemperaturePlan(
        temperature=temperature,
        best=ranked[0],
        plain=measured[-1],
        runner_up=ranked[1],
        why=_why(ranked, measured[-1]),
        by_size=tuple(_scaled(plan, factor) for plan in choice.by_size),
    )


def _candidates(choice: Choice, budget_s: float) -> list[Plan]:
    """The plans that are predicted fastest, as many as there is time for, a smaller one, and plain decoding.

    The guide's is always among them: another policy is taken only where its steps, too, show that it is faster.
    """
    first, *others = choice.ranked
    guides = [plan for plan in others if plan.policy == GUIDE]
    beside = [plan for plan in (choice.smaller, *guides, choice.plain) if plan is not None]
    found = [first]
    for plan in (plan for plan in others if plan.policy != GUIDE):
        if PROMPTS * (UNTIMED + STEPS[0]) * sum(one.step_s for one in (*found, *beside, plan)) > budget_s:
            break
        found.append(plan)
    return [*found, *beside]


def _row_steps(plans: Sequence[Plan], num_prompts: int, budget_s: float) -> int:
    """Timed steps of each plan behind a prompt: as many as let all prompts have their turn."""
    fitting = int(budget_s / (num_prompts * sum(plan.step_s for plan in plans))) - UNTIMED
    return min(max(fitting, STEPS[0]), STEPS[1])


def _try_behind_next(
    run: Run, trials: _Trials, racing: Sequence[int], model: AcceptanceModel, temperature: float, *, steps: int
) -> None:
    """Real steps of all that race behind the next prompt, every other time in the opposite order."""
    turn = len(trials.prompts)
    row = [math.nan] * len(trials.plans)
    for place in racing if turn % 2 == 0 else reversed(racing):
        plan = trials.plans[place]
        policy = open_policy(tree_settings(plan)).with_acceptance(model)
        found = run_steps(
            run.engine,
            run.prompts[turn % len(run.prompts)],
            policy,
            sampling=run.sampling(temperature),
            steps=1 + steps,
            seed=run.seed + turn,
        )
        row[place] = statistics.fmean(step.total_s for step in found[1:])
        if plan.policy != "none":
            trials.tokens += sum(len(step.tokens) for step in found)
            trials.predicted += plan.tokens * len(found)
    trials.prompts.append(turn % len(run.prompts))
    trials.seconds.append(row)


def _scaled(plan: Plan, factor: float) -> Plan:
    """The plan with so many times the tokens."""
    return with_tokens(plan, factor * plan.tokens)


def _why(ranked: Sequence[Plan], plain: Plan) -> str:
    """The decision in one sentence, with its numbers."""
    best, second = ranked[0], ranked[1]
    if best.policy == "none":
        return (
            f"speculation is {_slower(second, plain)} than plain decoding here: {second.policy} would give "
            f"{second.tokens_per_s:.3g} tokens/s, plain {best.tokens_per_s:.3g}; it is switched off"
        )
    gain = best.tokens_per_s / plain.tokens_per_s
    other = "next" if second.tokens_per_s <= best.tokens_per_s else "not clearly faster"
    return (
        f"{best.tokens:.3g} tokens a pass in {1000 * (best.measured_step_s or best.step_s):.3g} ms, "
        f"{gain:.3g} times plain decoding; {other}: {_name(second)} with {second.tokens_per_s:.3g} tokens/s "
        f"against {best.tokens_per_s:.3g}"
    )


def _slower(plan: Plan, plain: Plan) -> str:
    return "slower" if plan.tokens_per_s < plain.tokens_per_s else "hardly faster"


def _name(plan: Plan) -> str:
    return f"{plan.policy} {plan.draw or ''} {plan.size or ''}".strip()
