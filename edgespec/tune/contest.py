"""The sampling stage: all policies at the same texts, those that fall behind dropped, trees as large as may pay."""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from edgespec.grow.acceptance import AcceptanceModel
from edgespec.tune.acceptance import fitted, joined, shifted_to, with_measured
from edgespec.tune.costs import FEWEST, MeasuredCosts
from edgespec.tune.entrants import GUIDE, Contender, contenders, narrowed
from edgespec.tune.race import PROMPTS, Rule, by_prompt, clearly_faster, log_speeds, still_racing, unseen_share
from edgespec.tune.run import DEPTH, Run
from edgespec.tune.samples import Key, Samples, cut_to, sample_text
from edgespec.tuning.tree_choice import SIZES
from edgespec.tuning.tuner import may_follow_clock
from profiles.cost import Floats, GrowthCost
from profiles.schema import Plan
from profiles.tuner import Choice, Entrant, choose, deepened, tabulate, with_tokens

DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24)
COST_ERROR = 0.1  # steps that are tried take so much longer or shorter, next to others, than their parts do
TEXT_STEPS = 24  # of a text that goes on: models that talk to themselves fall into loops
FIT_PLACES = 64  # in texts, to fit an acceptance model to: of fewer, it learns these texts by heart


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The pair's acceptance, and the trees of those contenders that may be the best."""

    model: AcceptanceModel
    samples: Mapping[float, Samples]
    choices: Mapping[float, Choice]  # by temperature


def hold_contest(run: Run, costs: MeasuredCosts, model: AcceptanceModel, *, until_s: float) -> Outcome:
    """Learn the acceptance from adaptive trees, then compare everybody's, at other prompts first.

    `until_s`, on the clock of time.perf_counter, is when the trials end: a third of what is left is theirs.
    """
    explored, guides = _explore(run, costs, model, budget_s=(until_s - time.perf_counter()) / 3)
    records = joined(explored)
    num_places = sum(len(seen.prompts) for seen in explored.values())
    may_fit = run.effort.fits_acceptance and num_places >= FIT_PLACES
    own = fitted(records, seed=run.seed) if may_fit else None
    model = with_measured(own or shifted_to(model, records, num_places=num_places), records)

    ends_s = (until_s + time.perf_counter()) / 2
    compared, choices = {}, {}
    for done, (temperature, seen) in enumerate(explored.items()):
        size = max(_left(guides, seen, costs, run.effort.rule).values())
        compared[temperature], choices[temperature] = _compare(
            run,
            costs,
            model,
            temperature,
            size=size,
            first=seen.num_texts,
            budget_s=(ends_s - time.perf_counter()) / (len(explored) - done),
            report=functools.partial(_report_part, run, done),
        )
    everything = {
        temperature: replace(seen, records=[*seen.records, *compared[temperature].records])
        for temperature, seen in explored.items()
    }
    return Outcome(model=with_measured(model, joined(everything)), samples=compared, choices=choices)


def entrants(contending: Sequence[Contender], samples: Samples, growth: Mapping[Key, GrowthCost]) -> list[Entrant]:
    """Contenders as the tuner sees them."""
    return [
        Entrant(
            policy=contender.settings.policy,
            draw=contender.draw,
            samples=samples.trees[contender.key],
            growth=growth[contender.key],
            is_budgeted=contender.is_budgeted,
            takes_threshold=contender.policy.is_calibrated,
            branching=contender.settings.branching,
        )
        for contender in contending
    ]


def _explore(
    run: Run, costs: MeasuredCosts, model: AcceptanceModel, *, budget_s: float
) -> tuple[dict[float, Samples], list[Contender]]:
    """Trees of the policy that the acceptance model is for, at each prompt once, while there is time."""
    texts = run.effort.steps_per_prompt * len(run.temperatures)
    size = _affordable(costs, num_trees=2, num_places=PROMPTS * texts, budget_s=budget_s)
    guides = [one for one in contenders(size=size, depth=min(DEPTH, size)) if one.settings.policy == GUIDE]
    found = {temperature: Samples() for temperature in run.temperatures}
    numbers = range(len(run.prompts))
    if run.effort.fits_acceptance:  # and half of the prompts are left, to compare at trees of what was fitted
        numbers = numbers[: max(1, len(numbers) // 2)]
    report = functools.partial(run.report, "learning acceptance")
    for count, number in _visits(numbers, len(numbers), budget_s, report):
        for temperature, samples in found.items():
            _sample(run, run.prompts[number], guides, model, samples, temperature, number=number, seed=count)
    return found, guides


def _compare(
    run: Run,
    costs: MeasuredCosts,
    model: AcceptanceModel,
    temperature: float,
    *,
    size: int,
    first: int,
    budget_s: float,
    report: Callable[[float], None],
) -> tuple[Samples, Choice]:
    """Everybody's trees of at most `size` nodes at all prompts, from the `first` on, then further along each text.

    A profile must not change what a seed gives: trees that a text depends on are not compared.
    """
    samples, rule = Samples(), run.effort.rule
    places = PROMPTS * run.effort.steps_per_prompt
    size = min(size, _affordable(costs, num_trees=len(costs.growth), num_places=places, budget_s=budget_s))
    everybody, sampling = contenders(size=size, depth=min(DEPTH, size)), run.sampling(temperature)
    contending = [one for one in everybody if may_follow_clock(one.settings, sampling)]
    texts = {number: run.prompts[number] for number in _turned(len(run.prompts), first)}
    look_at = 2
    for count, number in _visits(list(texts), len(texts) * TEXT_STEPS // run.effort.steps_per_prompt, budget_s, report):
        seed = len(texts) + count  # other luck than at first
        texts[number] = _sample(run, texts[number], contending, model, samples, temperature, number=number, seed=seed)
        if count == look_at:
            contending = _among(_left(contending, samples, costs, rule), contending)
            samples = cut_to(contending, samples)
            look_at *= 2
    contending = _worth_a_switch(contending, samples, costs, rule)
    choice = _choice(entrants(contending, samples, costs.growth), costs)
    plans = _tabulated(contending, samples, costs)
    return samples, _promising(choice, unseen_share(plans.tokens, plans.seconds))


def _visits(
    numbers: Sequence[int], most: int, budget_s: float, report: Callable[[float], None]
) -> Iterator[tuple[int, int]]:
    """Numbers of prompts in turn, and how many that were, while there is time for one more; two at least."""
    started = time.perf_counter()
    for count, number in enumerate(itertools.islice(itertools.cycle(numbers), most), start=1):
        yield count, number
        with_next_s = (time.perf_counter() - started) * (count + 1) / count
        report(min(1.0, max(count / most, with_next_s / max(1e-9, budget_s))))
        if with_next_s > budget_s and count >= 2:
            return


def _report_part(run: Run, done: int, share: float) -> None:
    """Progress within one of the temperatures."""
    run.report("comparing trees", (done + share) / len(run.temperatures))


def _turned(count: int, first: int) -> list[int]:
    """All numbers, from this one on."""
    return [(first + place) % count for place in range(count)]


def _sample(
    run: Run,
    ids: list[int],
    contending: Sequence[Contender],
    model: AcceptanceModel,
    samples: Samples,
    temperature: float,
    *,
    number: int,
    seed: int,
) -> list[int]:
    """Everybody's trees at some steps behind a text, which is returned with what was added to it."""
    before, steps = len(samples.records), run.effort.steps_per_prompt
    longer = sample_text(
        run.engine,
        ids,
        contending,
        model,
        samples,
        sampling=run.sampling(temperature),
        steps=steps,
        seed=run.seed + seed,
    )
    samples.prompts += [number] * steps
    for records in samples.records[before:]:
        records["prompt"] = torch.full_like(records["taken"], number)
    return longer


def _of_costs(rule: Rule) -> Rule:
    """Return the rule for speeds that are predicted: a gain has to be larger than the error of costs."""
    return replace(rule, least_gain=max(rule.least_gain, COST_ERROR))


def _left(contending: Sequence[Contender], samples: Samples, costs: MeasuredCosts, rule: Rule) -> dict[Key, int]:
    """Contenders that have a plan which is not clearly slower than the best, with the largest such plan's nodes."""
    plans = _tabulated(contending, samples, costs)
    speeds = log_speeds(plans.tokens, plans.seconds, rule)
    left: dict[Key, int] = {}
    for place in still_racing(speeds, _of_costs(rule)):
        key = plans.keys[place]
        left[key] = max(math.ceil(plans.nodes[place]), left.get(key, 0))
    return left


def _worth_a_switch(
    contending: Sequence[Contender], samples: Samples, costs: MeasuredCosts, rule: Rule
) -> list[Contender]:
    """Return the guide, which comes first, and those whose best plan is clearly faster, by more than costs may err.

    Of many that are alike, a few texts would choose by luck, or a moment in which the guide's growth was timed slower
    than it is.
    """
    plans = _tabulated(contending, samples, costs)
    speeds = log_speeds(plans.tokens, plans.seconds, rule)
    best: dict[Key, int] = {}
    for place in speeds.measured.argsort().tolist():  # the last of each one's is its fastest
        best[plans.keys[place]] = place
    guide = contending[0]
    faster = set(clearly_faster(speeds, best[guide.key], _of_costs(rule)).tolist())
    return [one for one in contending if one is guide or best[one.key] in faster]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Plans:
    """Every size and depth of every contender."""

    keys: Sequence[Key]  # [plans], of the contenders
    nodes: Floats  # [plans], on average
    tokens: Floats  # [prompts, plans]
    seconds: Floats  # [prompts, plans]


def _tabulated(contending: Sequence[Contender], samples: Samples, costs: MeasuredCosts) -> _Plans:
    found = entrants(contending, samples, costs.growth)
    sizes = [size for size in SIZES if size <= costs.size]
    tables = [tabulate(entrant, costs.steps, sizes=sizes, depths=DEPTHS) for entrant in found]
    return _Plans(
        keys=[contender.key for contender, table in zip(contending, tables, strict=True) for _ in table.limits],
        nodes=np.concatenate([table.nodes.mean(0) for table in tables]),
        tokens=by_prompt(np.concatenate([table.tokens for table in tables], axis=1), samples.prompts),
        seconds=by_prompt(np.concatenate([table.seconds for table in tables], axis=1), samples.prompts),
    )


def _among(left: Mapping[Key, int], contending: Sequence[Contender]) -> list[Contender]:
    """Those that are left, with trees as large as what is left of each; the guide, which comes first, stays."""
    largest = max(left.values())
    return [
        narrowed(one, size=max(FEWEST, left.get(one.key, largest)))
        for index, one in enumerate(contending)
        if index == 0 or one.key in left
    ]


def _affordable(costs: MeasuredCosts, *, num_trees: int, num_places: int, budget_s: float) -> int:
    """Nodes of so many trees that there is time to look at in so many places, as if they had nothing in common.

    What they have in common makes up for the time that they take to grow.
    """
    fitting = [size for size in costs.verify if num_places * float(costs.steps.verify(num_trees * size)) <= budget_s]
    return min(costs.size, max([FEWEST, *fitting]))


def _promising(choice: Choice, share: float) -> Choice:
    """The choice with so much of the tokens that its trees yielded where they were chosen."""

    def of(plan: Plan) -> Plan:
        return with_tokens(plan, share * plan.tokens)

    return replace(
        choice,
        best=of(choice.best),
        runner_up=None if choice.runner_up is None else of(choice.runner_up),
        by_size=tuple(map(of, choice.by_size)),
        ranked=tuple(map(of, choice.ranked)),
        smaller=None if choice.smaller is None else of(choice.smaller),
    )


def _choice(found: Sequence[Entrant], costs: MeasuredCosts) -> Choice:
    """The best plans, as deep as hardly costs anything."""
    choice = choose(found, costs.steps, sizes=[size for size in SIZES if size <= costs.size], depths=DEPTHS)
    by_key = {(entrant.policy, entrant.draw): entrant for entrant in found}

    def deep(plan: Plan) -> Plan:
        return deepened(plan, by_key[plan.policy, plan.draw or ""], costs.steps, depths=DEPTHS)

    return replace(
        choice,
        ranked=tuple(deep(plan) for plan in choice.ranked),
        smaller=None if choice.smaller is None else deep(choice.smaller),
    )
