"""A profile of a loaded pair: costs timed, trees compared, the best plans tried at every temperature."""

from __future__ import annotations

import datetime
import time
from dataclasses import replace

from edgespec import __version__
from edgespec.engine import Engine
from edgespec.errors import EdgespecError
from edgespec.grow.acceptance import AcceptanceModel
from edgespec.placement.pair_profile import pair_facts
from edgespec.tune.acceptance import joined, reliability
from edgespec.tune.contest import Outcome, hold_contest
from edgespec.tune.costs import MeasuredCosts, measure_costs
from edgespec.tune.run import Run
from edgespec.tune.together import Together, measure_together, plans_by_texts
from edgespec.tune.trials import try_plans
from profiles.files import profile_name
from profiles.measure import (
    Repeats,
    copy_bytes_per_s,
    drop_page_cache,
    machine_facts,
    read_sequentially,
)
from profiles.schema import (
    SCHEMA,
    Bandwidths,
    GrowthTiming,
    Profile,
    RankAcceptance,
    TemperaturePlan,
    Timing,
    TogetherTiming,
)

DISK_READ_BYTES = 512 << 20


def profile_pair(run: Run, model: AcceptanceModel) -> Profile:
    """Measure and choose; `model` is the acceptance to start from. Raises EdgespecError without a draft."""
    engine = run.engine
    if engine.draft_model is None:
        raise EdgespecError("E_SETTING", "there is no draft to profile the target with.", "Name one with `draft`.")
    started = time.perf_counter()
    costs = measure_costs(run, model, budget_s=run.effort.budget_s / 4)  # of four stages
    ends_s = started + run.effort.allowed_s(costs.verify[0].median_s)
    together = measure_together(run, model, pass_s=costs.verify[0].median_s)
    outcome = hold_contest(run, costs, model, until_s=ends_s)
    plans = []
    for number, temperature in enumerate(run.temperatures):
        run.report("trying plans", number / len(run.temperatures))
        samples = outcome.samples[temperature]
        plan = try_plans(
            run,
            outcome.choices[temperature],
            outcome.model,
            temperature=temperature,
            num_texts=samples.num_texts,
            budget_s=(ends_s - time.perf_counter()) / (len(run.temperatures) - number),
        )
        plans.append(replace(plan, by_texts=plans_by_texts(run, costs, together, samples, plan)))
    run.report("trying plans", 1.0)
    return _profile(run, costs, together, outcome, tuple(plans))


def _profile(
    run: Run, costs: MeasuredCosts, together: Together, outcome: Outcome, plans: tuple[TemperaturePlan, ...]
) -> Profile:
    engine, model = run.engine, outcome.model
    machine = machine_facts(engine.device)
    pair = pair_facts(engine.pair, engine.run_config, engine.planned)  # by which the next run looks for the profile
    return Profile(
        schema=SCHEMA,
        created=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        edgespec=__version__,
        name=profile_name(machine, pair),
        context_tokens=max(map(len, run.prompts)),
        num_texts=min(max(len(trees) for trees in samples.trees.values()) for samples in outcome.samples.values()),
        machine=machine,
        pair=pair,
        bandwidths=_bandwidths(engine, plain_s=costs.verify[0].median_s),
        verify=_timings(costs.verify),
        draft=_timings(costs.draft),
        together=tuple(TogetherTiming(num_texts=texts, steps=_timings(timed)) for texts, timed in together.items()),
        rest_s=costs.steps.rest_s,
        plain_step_s=costs.steps.plain_step_s,
        prefetch_s=costs.steps.prefetch_s,
        growth=tuple(
            GrowthTiming(
                policy=policy,
                draw=draw,
                base_s=cost.base_s,
                layer_s=cost.layer_s,
                node_s=cost.node_s,
                rows_per_inner=cost.rows_per_inner,
            )
            for (policy, draw), cost in costs.growth.items()
        ),
        reliability=reliability(model, joined(outcome.samples)),
        ranks=tuple(
            RankAcceptance(draw=found.draw, temperature=found.temperature, rates=found.rates)
            for found in model.measured
        ),
        plans=plans,
        acceptance=model.to_document(),
        expert_use=tuple(tuple(round(share, 4) for share in layer) for layer in engine.expert_use or ()),
    )


def _timings(timed: dict[int, Repeats]) -> tuple[Timing, ...]:
    return tuple(
        Timing(count=count, median_s=found.median_s, spread_s=found.spread_s, repeats=len(found.seconds))
        for count, found in timed.items()
    )


def _bandwidths(engine: Engine, *, plain_s: float) -> Bandwidths:
    """Of the ways that weights take here; the disk's is read from the target's own files, uncached."""
    placement = engine.placement
    files = sorted({entry.file for entry in engine.pair.target.checkpoint.tensors.values()})
    disk_per_s = None
    if placement.num_on_disk and drop_page_cache(files):
        disk_per_s = read_sequentially(files, most_bytes=DISK_READ_BYTES).bytes_per_s
    has_copies = engine.device.type == "cuda" and not placement.is_resident
    return Bandwidths(
        disk_sequential_per_s=disk_per_s,
        disk_streamed_per_s=placement.disk_bytes / plain_s if placement.num_on_disk else None,
        copy_pinned_per_s=copy_bytes_per_s(engine.device, pinned=True) if has_copies else None,
        copy_pageable_per_s=copy_bytes_per_s(engine.device, pinned=False) if has_copies else None,
    )
