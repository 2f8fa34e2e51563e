"""What steps cost that several texts share, and the plans that follow: with more texts, each tree has fewer nodes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from edgespec.grow.acceptance import AcceptanceModel
from edgespec.grow.policies import open_policy
from edgespec.tree.settings import TreeSettings
from edgespec.tune.contest import DEPTHS, entrants
from edgespec.tune.costs import MeasuredCosts, curve
from edgespec.tune.entrants import contenders
from edgespec.tune.run import DEPTH, Run
from edgespec.tune.samples import Samples
from edgespec.tune.timings import run_steps_together
from edgespec.tuning.step import StepResult
from edgespec.tuning.tree_choice import SIZES
from profiles.cost import StepCosts
from profiles.measure import Repeats
from profiles.schema import Plan, TemperaturePlan
from profiles.tuner import choose, predict, with_tokens

NUM_TEXTS, NODES = (4, 16), (0, 8)  # of each text's tree
STEPS, UNTIMED = 3, 1
FEW_TEXTS, FEW_STEPS = (8,), 2  # where passes are long
LONG_PASS_S = 0.5
MAX_TOKENS, MIN_TOKENS = 64, 8  # of a prompt: what is asked for is the price of rows, not of long texts

Together = dict[int, dict[int, Repeats]]  # by texts under way and the nodes of all: seconds beside growth


def measure_together(run: Run, model: AcceptanceModel, *, pass_s: float) -> Together:
    """Time real steps of several texts, without trees and with small ones; `pass_s` is a pass of one text."""
    is_long = pass_s > LONG_PASS_S
    num_steps, num_untimed = (FEW_STEPS, 0) if is_long else (STEPS, UNTIMED)
    found: Together = {}
    every = [(texts, nodes) for texts in (FEW_TEXTS if is_long else NUM_TEXTS) for nodes in NODES]
    for number, (texts, nodes) in enumerate(every):
        if texts * nodes > run.max_nodes:
            continue
        run.report("timing texts together", number / len(every))
        tree = TreeSettings(size=nodes, threshold=0.0, stop_gain=0.0) if nodes else TreeSettings(policy="none")
        steps = run_steps_together(
            run.engine,
            _beginnings(run, texts),
            open_policy(tree).with_acceptance(model),
            sampling=run.sampling(run.temperatures[-1]),
            steps=num_untimed + num_steps,
            seed=run.seed,
        )[num_untimed:]
        whole = [step for step in steps if len(step) == texts]  # texts may have ended
        if whole:
            count = round(statistics.fmean(sum(text.num_drafted for text in step) for step in whole))
            found.setdefault(texts, {})[count] = Repeats(tuple(_beside_growth_s(step) for step in whole))
    run.report("timing texts together", 1.0)
    return {texts: dict(sorted(timed.items())) for texts, timed in found.items()}


def plans_by_texts(
    run: Run, costs: MeasuredCosts, together: Together, samples: Samples, plan: TemperaturePlan
) -> tuple[Plan, ...]:
    """Return the best trees of the plan's policy for each number of texts that was timed, or none where none pay."""
    trees = plan.best if plan.best.policy != "none" else plan.runner_up
    if trees is None or trees.policy == "none":
        return ()
    contending = contenders(size=costs.size, depth=min(DEPTH, costs.size))
    own = [one for one in contending if one.key == (trees.policy, trees.draw)]
    (entrant,) = entrants(own, samples, costs.growth)
    predicted = predict(entrant, costs.steps, size=trees.size, depth=trees.depth, threshold=trees.threshold)
    factor = trees.tokens / predicted.tokens  # by which trials corrected what trees were predicted to yield
    found = []
    for num_texts, timed in together.items():
        own_costs = _costs_of(num_texts, timed, costs.steps)
        best = choose([entrant], own_costs, sizes=[size for size in SIZES if size <= costs.size], depths=DEPTHS).best
        found.append(best if best.policy == "none" else with_tokens(best, factor * best.tokens))
    return tuple(found)


def _costs_of(num_texts: int, timed: dict[int, Repeats], alone: StepCosts) -> StepCosts:
    steps = curve(timed)
    return replace(alone, verify=steps, rest_s=0.0, plain_step_s=float(steps(0.0)), num_texts=num_texts)


def _beginnings(run: Run, texts: int) -> list[list[int]]:
    """Return beginnings of prompts that are no longer, all together, than memory was planned for."""
    tokens = min(MAX_TOKENS, max(MIN_TOKENS, run.engine.run_config.all_tokens // texts))
    return [run.prompts[number % len(run.prompts)][:tokens] for number in range(texts)]


def _beside_growth_s(step: Sequence[StepResult]) -> float:
    return step[0].target_s + step[0].rest_s  # the step's, which all texts are told
