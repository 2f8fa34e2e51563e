"""A profile that no machine has, for tests of what is done with one."""

from dataclasses import replace
from typing import Any

from profiles.schema import (
    SCHEMA,
    Bandwidths,
    GrowthSeconds,
    MachineFacts,
    PairFacts,
    PassCurve,
    PassPoint,
    Plan,
    Profile,
    SizeTokens,
    TemperaturePlan,
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
BY_SIZE = tuple(
    SizeTokens(size=size, tokens=tokens, nodes=0.9 * size, layers=layers, weight=24.0)
    for size, tokens, layers in ((4, 2.0, 2.0), (8, 3.0, 3.0), (16, 4.0, 4.0), (64, 5.0, 6.0))
)


def example_plan(**changes: Any) -> Plan:
    """Trees of 16 nodes at four tokens a second; plain decoding has two."""
    plan = Plan(
        pays=True,
        size=16,
        threshold=0.0,
        stop_gain=0.0,
        tokens=4.0,
        nodes=14.4,
        step_s=1.0,
        plain_step_s=0.5,
        num_trees=100,
        share_full=0.5,
        by_size=BY_SIZE,
        promised=(5.0,) * 10,
        kept=(4.0,) * 10,
    )
    return replace(plan, **changes)


PLAIN = example_plan(pays=False, step_s=4.0, plain_step_s=0.25)


def example_profile(*plans: Plan, temperatures: tuple[float, ...] = (0.0, 0.8), **changes: Any) -> Profile:
    """A profile of these best plans, one a temperature; the last one serves all that are left."""
    best = plans or (example_plan(threshold=0.01), example_plan(threshold=0.02))
    profile = Profile(
        schema=SCHEMA,
        created="2026-01-31T12:00:00Z",
        edgespec="0.1.0",
        name="some-gpu-big-small-12345678",
        context_tokens=128,
        num_prompts=12,
        machine=MACHINE,
        pair=PAIR,
        bandwidths=Bandwidths(copy_pinned_per_s=2.4e10, copy_pageable_per_s=1.1e10),
        passes=(
            PassCurve(num_texts=1, points=tuple(PassPoint(rows=n, seconds=0.2 + n / 1000) for n in (1.0, 17.0, 65.0))),
            PassCurve(num_texts=4, points=tuple(PassPoint(rows=n, seconds=0.206 + n / 1000) for n in (4.0, 36.0))),
        ),
        growth=GrowthSeconds(tree_s=0.0, layer_s=3e-3, node_s=1e-6),
        plans=tuple(
            TemperaturePlan(temperature=temperature, best=best[min(index, len(best) - 1)])
            for index, temperature in enumerate(temperatures)
        ),
        acceptance={"schema": "some/1", "about": {"pair": "big, small"}, "layers": [[0.5, -1.0], [2.0]]},
    )
    return replace(profile, **changes)
