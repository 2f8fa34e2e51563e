"""A profile that no machine has, for tests of what is done with one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from profiles.schema import (
    SCHEMA,
    Bandwidths,
    Bucket,
    GrowthTiming,
    MachineFacts,
    PairFacts,
    Plan,
    Profile,
    RankAcceptance,
    Reliability,
    TemperaturePlan,
    Timing,
    TogetherTiming,
)

MACHINE = MachineFacts(
    system="Linux-6.1",
    processor="Some CPU",
    num_cores=8,
    memory_bytes=32 << 30,
    accelerator="Some GPU",
    accelerator_bytes=12 << 30,
    driver="570.124",
    link="PCIe 4.0 x16",
    python="3.12.1",
    versions={"torch": "2.9.1", "transformers": "5.17.0"},
)
PAIR = PairFacts(
    target="big",
    target_fingerprint="1234",
    draft="small",
    draft_fingerprint="abcd",
    quant="nf4",
    draft_quant="none",
    dtype="bfloat16",
    device="cuda",
    num_layers=40,
    resident_layers=20,
    ram_layers=20,
    disk_layers=0,
)
PLAIN = Plan(policy="none", size=0, depth=0, tokens=1.0, nodes=0.0, step_s=0.5, measured_step_s=0.25)


def example_plan(policy: str = "adaptive", **changes: Any) -> Plan:
    """A tree of 16 nodes at four tokens a second, measured; predicted, at five."""
    plan = Plan(policy=policy, size=16, depth=4, tokens=4.0, nodes=14.5, step_s=0.8, measured_step_s=1.0)
    return replace(plan, **changes)


def example_profile(*plans: Plan, temperatures: tuple[float, ...] = (0.0, 0.8), **changes: Any) -> Profile:
    """A profile of these best plans, one a temperature; the last one serves all that are left."""
    best = plans or (example_plan(draw="coupled", threshold=0.01), example_plan(draw="coupled", threshold=0.02))
    profile = Profile(
        schema=SCHEMA,
        created="2026-01-31T12:00:00Z",
        edgespec="0.1.0",
        name="some-gpu-big-small-12345678",
        context_tokens=128,
        num_texts=12,
        machine=MACHINE,
        pair=PAIR,
        bandwidths=Bandwidths(copy_pinned_per_s=2.4e10, copy_pageable_per_s=1.1e10),
        verify=tuple(Timing(count=n, median_s=0.2 + n / 1000, spread_s=0.0, repeats=5) for n in (0, 1, 16, 64)),
        draft=tuple(Timing(count=n, median_s=0.002, spread_s=1e-5, repeats=5) for n in (1, 16, 64)),
        together=(
            TogetherTiming(
                num_texts=4,
                steps=tuple(Timing(count=n, median_s=0.21 + n / 900, spread_s=0.0, repeats=3) for n in (0, 32)),
            ),
        ),
        rest_s=0.003,
        plain_step_s=0.203,
        prefetch_s=0.0,
        growth=(
            GrowthTiming(policy="adaptive", draw="coupled", base_s=0, layer_s=1e-3, node_s=1e-6, rows_per_inner=1.5),
        ),
        reliability=Reliability(calibration_error=0.02, buckets=(Bucket(predicted=0.3, observed=0.32, weight=1.0),)),
        ranks=(RankAcceptance(draw="sampled", temperature=0.8, rates=(0.7, 0.1)),),
        plans=tuple(
            TemperaturePlan(
                temperature=temperature,
                best=best[min(index, len(best) - 1)],
                plain=PLAIN,
                runner_up=PLAIN,
                why="4 tokens a second against 2",
                by_size=(example_plan(size=8, measured_step_s=None), example_plan(draw="coupled")),
            )
            for index, temperature in enumerate(temperatures)
        ),
        acceptance={"schema": "some/1", "about": {"pair": "big, small"}, "layers": [[0.5, -1.0], [2.0]]},
    )
    return replace(profile, **changes)
