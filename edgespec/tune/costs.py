"""The timing stage: verify curve, draft curve, growth of each contender, and the rest of a step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from edgespec.grow.acceptance import AcceptanceModel
from edgespec.grow.policies import open_policy
from edgespec.tree.settings import TreeSettings
from edgespec.tune.entrants import Contender, contenders
from edgespec.tune.measuring_tree import widest_tree
from edgespec.tune.run import DEPTH, Run
from edgespec.tune.samples import Key, Text, start_text
from edgespec.tune.timings import Grown, draft_tasks, growth_task, prefetch_tasks, run_steps, verify_tasks
from edgespec.tuning.step import StepResult
from profiles.cost import Curve, GrowthCost, StepCosts, fit_growth
from profiles.measure import Repeats, Series, Task, time_interleaved

FEWEST = 16  # nodes that are always timed
COUNTS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512, 768)
GROWTH_POWER = 0.68  # twice the nodes bring at most 1.6 times the tokens: a pass that costs more does not pay
REST_SIZE = 16  # nodes of the trees whose steps' rest is timed
REST_STEPS = 6  # in a sitting
SITTINGS = 3  # of all that is timed
LONG_SITTINGS = 2  # where passes are long
TAKES_TURNS_S = 0.05  # passes that are no longer can be spent on bringing the caches into the state of a step
LONGEST_PAUSE_S = 1.0
FAR_APART = 0.5  # between the quartiles, of the median


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCosts:
    """The costs of a pair's steps, fitted to what was timed."""

    verify: dict[int, Repeats]
    draft: dict[int, Repeats]
    growth: dict[Key, GrowthCost]
    size: int  # the largest that may pay
    steps: StepCosts


def measure_costs(run: Run, model: AcceptanceModel, *, budget_s: float) -> MeasuredCosts:
    """Time everything at one text, in several sittings: a machine that is slow for a while must not slow one part.

    There is one sitting at least, and each times everything once at least.
    """
    started = time.perf_counter()
    text = _timing_text(run)
    once_s = _worth_timing(run, text)
    size, takes_turns = max(once_s), once_s[0] < TAKES_TURNS_S
    sittings = SITTINGS if takes_turns else LONG_SITTINGS
    series_s = budget_s / 3  # passes, growth, and the rest together
    sitting_s = series_s / sittings
    contending = contenders(size=size, depth=min(DEPTH, size))
    growths = _growths(run, text, contending, model, takes_turns=takes_turns)
    passes = Series(
        verify_tasks(run.engine, text, list(once_s), seed=run.seed, takes_turns=takes_turns),
        budget_s=sitting_s,
        warms_up=takes_turns,  # long passes were just seen once
    )
    calls = Series(
        draft_tasks(run.engine, text, [count for count in once_s if count], seed=run.seed), budget_s=sitting_s / 2
    )
    growing = Series({place: task for place, (task, _) in growths.items()}, budget_s=sitting_s)
    tree = TreeSettings(policy="dyspec", size=min(size, REST_SIZE))
    speculating: list[StepResult] = []
    plain: list[StepResult] = []
    every: tuple[Series[Any], ...] = (passes, calls, growing)
    part = 1 / (sittings * len(every))
    for sitting in range(sittings):
        for number, series in enumerate(every):
            series.sit(_told(run, part * (sitting * len(every) + number), part))
        speculating += _steps(run, tree)
        plain += _steps(run, TreeSettings(policy="none"))
        if time.perf_counter() - started > budget_s:
            break
    verify, draft = passes.repeats(), calls.repeats()
    if (note := note_of_others(verify)) is not None:
        run.warn(note)
    return MeasuredCosts(
        verify=verify,
        draft=draft,
        growth=_fitted(contending, growths, growing.repeats(), curve(draft)),
        size=size,
        steps=StepCosts(
            verify=curve(verify),
            draft=curve(draft),
            rest_s=statistics.median(step.rest_s for step in speculating),
            plain_step_s=statistics.median(step.total_s for step in plain),
            prefetch_s=_time_prefetch(run, text, verify[0].median_s, budget_s=series_s / 2),
        ),
    )


def note_of_others(verify: Mapping[int, Repeats]) -> str | None:
    """Return what is to be said where the repeats of most sizes lie far apart: no pair does that by itself."""
    shares = {count: found.spread_s / found.median_s for count, found in verify.items()}
    if statistics.median(shares.values()) <= FAR_APART:
        return None
    count = max(shares, key=lambda count: shares[count])
    took_ms, spread_ms = 1000 * verify[count].median_s, 1000 * verify[count].spread_s
    return (
        f"other programs were running: passes over {count} nodes took {took_ms:.1f} ms, and {spread_ms:.1f} ms lie "
        "between their quartiles; measure again when those have ended"
    )


def curve(timed: dict[int, Repeats]) -> Curve:
    """Return the timings' medians as a curve."""
    return Curve(tuple(map(float, timed)), tuple(repeats.median_s for repeats in timed.values()))


def _timing_text(run: Run) -> Text:
    """Read the longest prompt."""
    return start_text(
        run.engine,
        max(run.prompts, key=len),
        sampling=run.sampling(run.temperatures[-1]),
        tree=widest_tree(run.max_nodes),
        generator=torch.Generator(run.engine.device).manual_seed(run.seed),
    )


def _worth_timing(run: Run, text: Text) -> dict[int, float]:
    """Return the sizes of trees that could pay, with the seconds that one pass over each took."""
    found: dict[int, float] = {}
    before = 0
    for count in COUNTS:
        if count > run.max_nodes:
            break
        tasks = verify_tasks(run.engine, text, [count], seed=run.seed, takes_turns=False)
        found[count] = time_interleaved(tasks, budget_s=0, min_rounds=1, max_rounds=1)[count].median_s
        run.report("trying sizes", len(found) / len(COUNTS))
        if count > FEWEST and found[count] > found[before] * (count / before) ** GROWTH_POWER:
            break
        before = count
    run.report("trying sizes", 1.0)
    return found


def _told(run: Run, done: float, part: float) -> Callable[[float], None]:
    """Return a function that reports progress within one part of the timing, behind the parts that are done."""
    return lambda share: run.report("timing", done + part * share)


def _growths(
    run: Run, text: Text, contending: Sequence[Contender], model: AcceptanceModel, *, takes_turns: bool
) -> dict[tuple[Key, int], tuple[Task, Grown]]:
    """Return the growths to be timed, several sizes and depths of each contender, and where each tree will stand."""
    generator = torch.Generator(run.engine.device).manual_seed(run.seed)
    sampling = run.sampling(run.temperatures[-1])
    found = {}
    for contender in contending:
        for number, settings in enumerate(_smaller(contender)):
            policy = open_policy(settings).with_acceptance(model)
            found[contender.key, number] = growth_task(
                run.engine, text, policy, sampling=sampling, generator=generator, takes_turns=takes_turns
            )
    return found


def _fitted(
    contending: Sequence[Contender],
    growths: Mapping[tuple[Key, int], tuple[Task, Grown]],
    timed: Mapping[tuple[Key, int], Repeats],
    draft: Curve,
) -> dict[Key, GrowthCost]:
    """Fit what growing costs each contender."""
    costs = {}
    for contender in contending:
        places = [place for place in growths if place[0] == contender.key]
        grown = [growths[place][1] for place in places]
        inner = [one.inner() for one in grown]
        costs[contender.key] = fit_growth(
            draft,
            inner,
            [one.num_nodes for one in grown],
            [timed[place].median_s for place in places],
            sum(one.rows for one in grown) / max(1.0, sum(map(sum, inner))),
        )
    return costs


def _smaller(contender: Contender) -> list[TreeSettings]:
    """Return the contender's settings at several sizes and depths."""
    settings = contender.settings
    if not contender.is_budgeted:
        return [settings]
    if settings.draft_tokens is not None:
        return [replace(settings, draft_tokens=count) for count in sorted({1, 4, settings.draft_tokens})]
    size = settings.size
    sizes = sorted({1, min(3, size), min(8, size), min(24, size), min(96, size), size})
    shallow = replace(settings, size=size, depth=min(4, size))
    return [shallow, *(replace(settings, size=count, depth=min(DEPTH, count)) for count in sizes)]


def _time_prefetch(run: Run, text: Text, plain_s: float, *, budget_s: float) -> float:
    """Time what a pass saves when the stream had time to read ahead."""
    if run.engine.placement.is_resident:
        return 0.0
    tasks = prefetch_tasks(run.engine, text, pause_s=min(LONGEST_PAUSE_S, plain_s), seed=run.seed)
    timed = time_interleaved(tasks, budget_s=budget_s)
    return max(0.0, timed["at once"].median_s - timed["after a pause"].median_s)


def _steps(run: Run, settings: TreeSettings) -> list[StepResult]:
    """Run some real steps."""
    sampling = run.sampling(run.temperatures[-1])
    return run_steps(
        run.engine, run.prompts[0], open_policy(settings), sampling=sampling, steps=REST_STEPS, seed=run.seed
    )
