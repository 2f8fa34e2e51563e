"""The timing stage: verify curve, draft curve, growth of each contender, and the rest of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from edgespec.decode import StepResult
from edgespec.grow.acceptance import AcceptanceModel
from edgespec.grow.policies import open_policy
from edgespec.tree_settings import TreeSettings
from edgespec.tune.entrants import Contender, contenders
from edgespec.tune.run import DEPTH, Run
from edgespec.tune.samples import Key, Text, start_text
from edgespec.tune.timings import Grown, draft_tasks, growth_task, prefetch_tasks, run_steps, verify_tasks
from profiles.cost import Curve, GrowthCost, StepCosts, fit_growth
from profiles.measure import Repeats, Task, time_interleaved

FEWEST = 16  # nodes that are always timed
COUNTS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512, 768)
GROWTH_POWER = 0.68  # twice the nodes bring at most 1.6 times the tokens: a pass that costs more does not pay
REST_SIZE = 16  # nodes of the trees whose steps' rest is timed
REST_STEPS = 12
TAKES_TURNS_S = 0.05  # passes that are no longer can be spent on bringing the caches into the state of a step
LONGEST_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCosts:
    """Everything that was timed."""

    verify: dict[int, Repeats]
    draft: dict[int, Repeats]
    growth: dict[Key, GrowthCost]
    contending: Sequence[Contender]  # at the largest size that may pay
    size: int  # that one
    steps: StepCosts


def measure_costs(run: Run, model: AcceptanceModel) -> MeasuredCosts:
    """Time everything at one text."""
    text = _timing_text(run)
    once_s = _worth_timing(run, text)
    size, takes_turns = max(once_s), once_s[0] < TAKES_TURNS_S
    verify = time_interleaved(
        verify_tasks(run.engine, text, list(once_s), seed=run.seed, takes_turns=takes_turns),
        budget_s=run.effort.timing_s,
        min_rounds=3 if takes_turns else 2,
        warms_up=takes_turns,  # long passes were just seen once
        progress=lambda share: run.report("timing passes", 0.3 + 0.7 * share),
    )
    draft = time_interleaved(
        draft_tasks(run.engine, text, [count for count in once_s if count], seed=run.seed),
        budget_s=run.effort.timing_s / 2,
        progress=lambda share: run.report("timing the draft", share),
    )
    contending = contenders(size=size, depth=min(DEPTH, size))
    growth = _time_growth(run, text, contending, model, curve(draft), takes_turns=takes_turns)
    prefetch_s = _time_prefetch(run, text, verify[0].median_s)
    steps = StepCosts(
        verify=curve(verify),
        draft=curve(draft),
        rest_s=_time_steps(run, TreeSettings(policy="dyspec", size=min(size, REST_SIZE)), lambda step: step.rest_s),
        plain_step_s=_time_steps(run, TreeSettings(policy="none"), lambda step: step.target_s + step.rest_s),
        prefetch_s=prefetch_s,
    )
    return MeasuredCosts(verify=verify, draft=draft, growth=growth, contending=contending, size=size, steps=steps)


def curve(timed: dict[int, Repeats]) -> Curve:
    """The medians as a curve."""
    return Curve(tuple(map(float, timed)), tuple(repeats.median_s for repeats in timed.values()))


def _timing_text(run: Run) -> Text:
    """The longest prompt in both caches, with room for the largest tree of the policy that drafts most."""
    return start_text(
        run.engine,
        max(run.prompts, key=len),
        sampling=run.sampling(run.temperatures[-1]),
        tree=TreeSettings(policy="opt-tree", size=run.max_nodes, depth=DEPTH),
        new_tokens=1,
        generator=torch.Generator(run.engine.device).manual_seed(run.seed),
    )


def _worth_timing(run: Run, text: Text) -> dict[int, float]:
    """Sizes of trees that could pay, with the seconds that one pass over each took."""
    found: dict[int, float] = {}
    before = 0
    for count in COUNTS:
        if count > run.max_nodes:
            break
        tasks = verify_tasks(run.engine, text, [count], seed=run.seed, takes_turns=False)
        found[count] = time_interleaved(tasks, budget_s=0, min_rounds=1, max_rounds=1)[count].median_s
        run.report("timing passes", 0.3 * len(found) / len(COUNTS))
        if count > FEWEST and found[count] > found[before] * (count / before) ** GROWTH_POWER:
            break
        before = count
    return found


def _time_growth(
    run: Run,
    text: Text,
    contending: Sequence[Contender],
    model: AcceptanceModel,
    draft: Curve,
    *,
    takes_turns: bool,
) -> dict[Key, GrowthCost]:
    """Fit what growing costs each contender, over trees of several sizes and depths."""
    generator = torch.Generator(run.engine.device).manual_seed(run.seed)
    sampling = run.sampling(run.temperatures[-1])
    tasks: dict[tuple[Key, int], Task] = {}
    grown: dict[tuple[Key, int], Grown] = {}
    for contender in contending:
        for number, settings in enumerate(_smaller(contender)):
            policy = open_policy(settings).with_acceptance(model)
            place = contender.key, number
            tasks[place], grown[place] = growth_task(
                run.engine, text, policy, sampling=sampling, generator=generator, takes_turns=takes_turns
            )
    timed = time_interleaved(
        tasks, budget_s=run.effort.timing_s, progress=lambda share: run.report("timing growth", share)
    )
    costs = {}
    for contender in contending:
        places = [place for place in tasks if place[0] == contender.key]
        inner = [grown[place].inner() for place in places]
        costs[contender.key] = fit_growth(
            draft,
            inner,
            [grown[place].num_nodes for place in places],
            [timed[place].median_s for place in places],
            sum(grown[place].rows for place in places) / max(1.0, sum(map(sum, inner))),
        )
    return costs


def _smaller(contender: Contender) -> list[TreeSettings]:
    """The contender's settings at several sizes and depths."""
    settings = contender.settings
    if not contender.is_budgeted:
        return [settings]
    if settings.draft_tokens is not None:
        return [replace(settings, draft_tokens=count) for count in sorted({1, 4, settings.draft_tokens})]
    size = settings.size
    sizes = sorted({1, min(3, size), min(8, size), min(24, size), min(96, size), size})
    shallow = replace(settings, size=size, depth=min(4, size))
    return [shallow, *(replace(settings, size=count, depth=min(DEPTH, count)) for count in sizes)]


def _time_prefetch(run: Run, text: Text, plain_s: float) -> float:
    """What a pass saves when the stream had time to read ahead."""
    if run.engine.placement.num_resident == run.engine.placement.num_layers:
        return 0.0
    tasks = prefetch_tasks(run.engine, text, pause_s=min(LONGEST_PAUSE_S, plain_s), seed=run.seed)
    timed = time_interleaved(tasks, budget_s=run.effort.timing_s / 2)
    return max(0.0, timed["at once"].median_s - timed["after a pause"].median_s)


def _time_steps(run: Run, settings: TreeSettings, part: Callable[[StepResult], float]) -> float:
    """The median of a part of real steps."""
    policy = open_policy(settings)
    sampling = run.sampling(run.temperatures[-1])
    steps = run_steps(run.engine, run.prompts[0], policy, sampling=sampling, steps=REST_STEPS, seed=run.seed)
    return Repeats(tuple(map(part, steps))).median_s
