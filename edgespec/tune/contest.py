"""The sampling stage: all contenders at the same texts, those that fall behind dropped."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from edgespec.grow.acceptance import AcceptanceModel
from edgespec.tune.acceptance import fitted, joined, shifted_to, with_measured
from edgespec.tune.costs import MeasuredCosts
from edgespec.tune.entrants import Contender, contenders, narrowed
from edgespec.tune.run import DEPTH, Run
from edgespec.tune.samples import Key, Samples, cut_to, sample_text
from profiles.cost import GrowthCost
from profiles.schema import Plan
from profiles.tuner import Choice, Entrant, choose, deepened

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768)
DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24)
COARSE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 768)
COARSE_DEPTHS = (1, 2, 3, 4, 6, 8, 16)
FAR_BEHIND = 0.75  # of the best, as far as the first few trees tell
MORE = 3  # times the nodes that looked best: more trees can be compared if they are smaller
BEHIND = 0.87  # of the best: a contender that is slower is not looked at further
MIN_PROMPTS = 2  # before any is dropped
LOOK_AGAIN = 1.5  # times the prompts of the last look at who is behind, which takes longer the more trees there are
ROUGH_PLACES = 32  # at each temperature, before trees become as small as the plans that are left
LEAST_PLACES = 96  # in all, if that takes no more than
PATIENCE = 4.0  # times the time that there is
MAX_ROUNDS = 6  # of going on with the same texts: models that talk to themselves fall into loops
LEARNING_STEPS = 2  # of each prompt
OVERLAP = 5.0  # trees of the largest size that all contenders' trees together make, as far as seen
FEWEST = 16  # nodes
FIT_PLACES = 64  # in texts, to fit an acceptance model to: of fewer, it learns these texts by heart
FIRST_SHARE = 0.3  # of the time, to learn the pair's acceptance from
ROUGH_SHARE = 0.2  # to tell which plans may be the best


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The pair's acceptance, and the trees of those contenders that may be the best."""

    model: AcceptanceModel
    samples: Mapping[float, Samples]
    choices: Mapping[float, Choice]  # by temperature


def hold_contest(run: Run, costs: MeasuredCosts, model: AcceptanceModel) -> Outcome:
    """Learn the acceptance on the first prompts, with trees of the largest size; compare trees on the others, as
    large as may still pay; then the best of them on all prompts, no larger than their plans may become.
    """
    first, rest = _split(len(run.prompts))
    explored = {temperature: Samples() for temperature in run.temperatures}
    size = _learning_size(run, costs)
    contending = {temperature: contenders(size=size, depth=min(DEPTH, size)) for temperature in run.temperatures}
    _sample(
        run,
        first,
        explored,
        contending,
        model,
        until_s=FIRST_SHARE * run.effort.sampling_s,
        stage="learning acceptance",
        steps=LEARNING_STEPS,
    )
    records = joined(explored)
    num_places = sum(len(seen.trees[contending[temperature][0].key]) for temperature, seen in explored.items())
    may_fit = run.effort.fits_acceptance and num_places >= FIT_PLACES
    own = fitted(records, seed=run.seed) if may_fit else None
    model = with_measured(own or shifted_to(model, records, num_places=num_places), explored)

    compared = {temperature: Samples() for temperature in run.temperatures}
    for temperature, seen in explored.items():
        near = _near(contending[temperature], seen, costs, share=FAR_BEHIND)
        size = min(costs.size, _worth_growing(near))
        contending[temperature] = _among(near, contenders(size=size, depth=min(DEPTH, size)))

    def drop_behind() -> None:
        for temperature, seen in compared.items():
            near = _near(contending[temperature], seen, costs, share=BEHIND)
            contending[temperature] = _among(near, contending[temperature])

    _sample(
        run,
        rest,
        compared,
        contending,
        model,
        until_s=ROUGH_SHARE * run.effort.sampling_s,
        stage="comparing trees",
        steps=run.effort.steps_per_prompt,
        drop_behind=drop_behind,
        least_places=ROUGH_PLACES,
    )
    for temperature, seen in compared.items():
        near = _near(contending[temperature], seen, costs, share=BEHIND)
        size = _worth_growing(near)
        contending[temperature] = [narrowed(one, size=size) for one in _among(near, contending[temperature])]
        compared[temperature] = cut_to(contending[temperature], seen)
    _sample(
        run,
        range(len(run.prompts)),
        compared,
        contending,
        model,
        until_s=(1 - FIRST_SHARE - ROUGH_SHARE) * run.effort.sampling_s,
        stage="comparing the best",
        steps=run.effort.steps_per_prompt,
        drop_behind=drop_behind,
        least_places=LEAST_PLACES - ROUGH_PLACES,
        seed=MAX_ROUNDS * len(run.prompts),
    )
    # Tokens are of the first trees: both draws grew theirs at the same places, and of one size.
    everything = {
        temperature: Samples(trees=seen.trees, records=[*seen.records, *compared[temperature].records])
        for temperature, seen in explored.items()
    }
    return Outcome(
        model=with_measured(model, everything),
        samples=compared,
        choices={
            temperature: _choice(entrants(contending[temperature], seen, costs.growth), costs)
            for temperature, seen in compared.items()
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
            takes_threshold=contender.policy.is_calibrated,
            branching=contender.settings.branching,
        )
        for contender in contending
        if samples.trees[contender.key]
    ]


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


def _learning_size(run: Run, costs: MeasuredCosts) -> int:
    """Nodes of the first trees: the most that may pay, or as many as there is time for."""
    texts = MIN_PROMPTS * LEARNING_STEPS * len(run.temperatures)
    fitting = [
        size
        for size in costs.verify
        if size >= FEWEST and OVERLAP * float(costs.steps.verify(size)) * texts <= run.effort.sampling_s
    ]
    return max(fitting, default=min(FEWEST, costs.size))


def _split(num_prompts: int) -> tuple[list[int], list[int]]:
    """Prompts to learn the acceptance from, and others to compare on; one prompt must do for both."""
    count = max(1, num_prompts // 3)
    numbers = list(range(num_prompts))
    return numbers[:count], numbers[count:] or numbers


def _sample(
    run: Run,
    numbers: Sequence[int],
    samples: Mapping[float, Samples],
    contending: Mapping[float, Sequence[Contender]],
    model: AcceptanceModel,
    *,
    until_s: float,
    stage: str,
    steps: int,
    drop_behind: Callable[[], None] = lambda: None,
    least_places: int = 0,
    seed: int = 0,
) -> None:
    """Values of everybody's trees at prompt after prompt, then further along each, until the time is spent.

    Where a pass is slow there are `least_places` at each temperature, within PATIENCE. `numbers` are those of the
    prompts; `contending` may change between two of them.
    """
    started = time.perf_counter()
    texts = {(number, temperature): list(run.prompts[number]) for number in numbers for temperature in samples}
    most = MAX_ROUNDS * len(numbers)
    look_at = float(MIN_PROMPTS)
    for count, number in enumerate(itertools.islice(itertools.cycle(numbers), most), start=1):
        for temperature, found in samples.items():
            before = len(found.records)
            texts[number, temperature] = sample_text(
                run.engine,
                texts[number, temperature],
                contending[temperature],
                model,
                found,
                sampling=run.sampling(temperature),
                steps=steps,
                seed=run.seed + seed + count,
            )
            for records in found.records[before:]:
                records["prompt"] = torch.full_like(records["rank"], number)
        spent_s = time.perf_counter() - started
        has_enough = count * steps >= least_places or spent_s > PATIENCE * until_s
        enough_s = until_s if has_enough else PATIENCE * until_s
        run.report(stage, min(1.0, max(count / most, spent_s / enough_s)))
        if count >= look_at:
            drop_behind()
            look_at = LOOK_AGAIN * count
        if spent_s > until_s and has_enough and count >= min(MIN_PROMPTS, len(numbers)):
            return


def _near(contending: Sequence[Contender], samples: Samples, costs: MeasuredCosts, *, share: float) -> list[Plan]:
    """The best plan of each contender that is as fast as this share of the fastest, roughly."""
    choice = choose(
        entrants(contending, samples, costs.growth),
        costs.steps,
        sizes=[size for size in COARSE_SIZES if size <= costs.size],
        depths=COARSE_DEPTHS,
    )
    return [plan for plan in choice.ranked if plan.tokens_per_s >= share * choice.ranked[0].tokens_per_s]


def _worth_growing(near: Sequence[Plan]) -> int:
    """Nodes of trees that tell about these plans, and about larger ones that may turn out better."""
    return max(FEWEST, math.ceil(MORE * max(plan.nodes for plan in near)))


def _among(near: Sequence[Plan], contending: Sequence[Contender]) -> list[Contender]:
    """Those that have a plan here; the guide, which comes first, stays."""
    keys = {(plan.policy, plan.draw) for plan in near}
    return [contender for index, contender in enumerate(contending) if index == 0 or contender.key in keys]
