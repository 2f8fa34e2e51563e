"""The sampling stage: all contenders at the same texts, those that fall behind dropped."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from edgespec.grow.acceptance import AcceptanceModel
from edgespec.tune.acceptance import fitted, joined, shifted_to, with_measured
from edgespec.tune.costs import MeasuredCosts
from edgespec.tune.entrants import Contender, contenders
from edgespec.tune.run import DEPTH, Run
from edgespec.tune.samples import Key, Samples, sample_text
from profiles.cost import GrowthCost
from profiles.tuner import Choice, Entrant, choose

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768)
DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24)
COARSE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 768)
COARSE_DEPTHS = (1, 2, 3, 4, 6, 8, 16)
FAR_BEHIND = 0.75  # of the best, as far as the first few trees tell
MORE = 3  # times the size that looked best: more trees can be compared if they are smaller
BEHIND = 0.87  # of the best: a contender that is slower is not looked at further
MIN_PROMPTS = 2  # before any is dropped
LEAST_PLACES = 96  # at each temperature, to compare at, if that takes no more than
PATIENCE = 4.0  # times the time that there is
MAX_ROUNDS = 6  # of going on with the same texts: models that talk to themselves fall into loops
LEARNING_STEPS = 2  # of each prompt
OVERLAP = 5.0  # trees of the largest size that all contenders' trees together make, as far as seen
FEWEST = 16  # nodes
FIT_PLACES = 64  # in texts, to fit an acceptance model to: of fewer, it learns these texts by heart
FIRST_SHARE = 0.3  # of the time, to learn the pair's acceptance from


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The pair's acceptance, and the trees of those contenders that may be the best."""

    model: AcceptanceModel
    samples: Mapping[float, Samples]
    choices: Mapping[float, Choice]  # by temperature


def hold_contest(run: Run, costs: MeasuredCosts, model: AcceptanceModel) -> Outcome:
    """Learn the acceptance on the first prompts, with trees of the largest size; then compare smaller ones on the
    others, as large as may still pay.
    """
    first, rest = _split(run.prompts)
    explored = {temperature: Samples() for temperature in run.temperatures}
    size = _learning_size(run, costs)
    everybody = {temperature: contenders(size=size, depth=min(DEPTH, size)) for temperature in run.temperatures}
    _sample(
        run,
        first,
        explored,
        everybody,
        model,
        until_s=FIRST_SHARE * run.effort.sampling_s,
        stage="learning acceptance",
        steps=LEARNING_STEPS,
    )
    records = joined(explored)
    num_places = sum(len(seen.trees[everybody[temperature][0].key]) for temperature, seen in explored.items())
    may_fit = run.effort.fits_acceptance and num_places >= FIT_PLACES
    own = fitted(records, seed=run.seed) if may_fit else None
    model = with_measured(own or shifted_to(model, records, num_places=num_places), explored)

    samples = {temperature: Samples() for temperature in run.temperatures}
    surviving: dict[float, list[Contender]] = {}
    for temperature, seen in explored.items():
        choice = _rough_choice(everybody[temperature], seen, costs)
        near = [plan for plan in choice.ranked if plan.tokens_per_s >= FAR_BEHIND * choice.ranked[0].tokens_per_s]
        size = min(costs.size, max(FEWEST, MORE * max(plan.size for plan in near)))
        keys = {(plan.policy, plan.draw) for plan in near}
        surviving[temperature] = [
            contender
            for index, contender in enumerate(contenders(size=size, depth=min(DEPTH, size)))
            if index == 0 or contender.key in keys
        ]

    def drop(num_prompts: int) -> None:
        if num_prompts >= MIN_PROMPTS:
            for temperature, contending in surviving.items():
                choice = _rough_choice(contending, samples[temperature], costs)
                surviving[temperature] = _ahead(contending, choice)

    _sample(
        run,
        rest,
        samples,
        surviving,
        model,
        until_s=(1 - FIRST_SHARE) * run.effort.sampling_s,
        stage="comparing trees",
        steps=run.effort.steps_per_prompt,
        after_prompt=drop,
        least_places=LEAST_PLACES,
    )
    return Outcome(
        model=with_measured(model, samples),
        samples=samples,
        choices={
            temperature: choose(
                entrants(surviving[temperature], samples[temperature], costs.growth),
                costs.steps,
                sizes=[size for size in SIZES if size <= costs.size],
                depths=DEPTHS,
            )
            for temperature in run.temperatures
        },
    )


def entrants(contending: Sequence[Contender], samples: Samples, growth: Mapping[Key, GrowthCost]) -> list[Entrant]:
    """Contenders as the tuner sees them."""
    return [
        Entrant(
            policy=contender.settings.policy,
            draw=contender.draw,
            samples=samples.trees[contender.key],
            growth=growth[contender.key],
            is_budgeted=contender.is_budgeted,
            takes_threshold=contender.takes_threshold,
            branching=contender.settings.branching,
        )
        for contender in contending
        if samples.trees[contender.key]
    ]


def _learning_size(run: Run, costs: MeasuredCosts) -> int:
    """Nodes of the first trees: the most that may pay, or as many as there is time for."""
    texts = MIN_PROMPTS * LEARNING_STEPS * len(run.temperatures)
    fitting = [
        size
        for size in costs.verify
        if size >= FEWEST and OVERLAP * float(costs.steps.verify(size)) * texts <= run.effort.sampling_s
    ]
    return max(fitting, default=min(FEWEST, costs.size))


def _split(prompts: Sequence[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts to learn the acceptance from, and to compare on; one prompt must do for both."""
    count = max(1, len(prompts) // 3)
    first, rest = list(prompts[:count]), list(prompts[count:])
    return first, rest or first


def _sample(
    run: Run,
    prompts: Sequence[list[int]],
    samples: Mapping[float, Samples],
    contending: Mapping[float, Sequence[Contender]],
    model: AcceptanceModel,
    *,
    until_s: float,
    stage: str,
    steps: int,
    after_prompt: Callable[[int], None] = lambda _count: None,
    least_places: int = 0,
) -> None:
    """Values of everybody's trees at prompt after prompt, then further along each, until the time is spent.

    Where a pass is slow there are `least_places` at each temperature, within PATIENCE.
    """
    started = time.perf_counter()
    texts = {(index, temperature): list(ids) for index, ids in enumerate(prompts) for temperature in samples}
    for number in range(MAX_ROUNDS):
        for index in range(len(prompts)):
            for temperature, found in samples.items():
                before = len(found.records)
                texts[index, temperature] = sample_text(
                    run.engine,
                    texts[index, temperature],
                    contending[temperature],
                    model,
                    found,
                    sampling=run.sampling(temperature),
                    steps=steps,
                    seed=run.seed + index + number * len(prompts),
                )
                for records in found.records[before:]:
                    records["prompt"] = torch.full_like(records["rank"], index)
            spent_s = time.perf_counter() - started
            num_texts = number * len(prompts) + index + 1
            has_enough = num_texts * steps >= least_places or spent_s > PATIENCE * until_s
            enough_s = until_s if has_enough else PATIENCE * until_s
            run.report(stage, min(1.0, max(num_texts / (MAX_ROUNDS * len(prompts)), spent_s / enough_s)))
            after_prompt(num_texts)
            if spent_s > until_s and has_enough and (number > 0 or index + 1 >= min(MIN_PROMPTS, len(prompts))):
                return


def _rough_choice(contending: Sequence[Contender], samples: Samples, costs: MeasuredCosts) -> Choice:
    return choose(
        entrants(contending, samples, costs.growth),
        costs.steps,
        sizes=[size for size in COARSE_SIZES if size <= costs.size],
        depths=COARSE_DEPTHS,
    )


def _ahead(contending: Sequence[Contender], choice: Choice) -> list[Contender]:
    """Those whose best plan is not far behind; the guide, which comes first, stays."""
    best = choice.ranked[0].tokens_per_s
    near = {(plan.policy, plan.draw) for plan in choice.ranked if plan.tokens_per_s >= BEHIND * best}
    return [contender for index, contender in enumerate(contending) if index == 0 or contender.key in near]
