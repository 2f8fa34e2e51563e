"""A profile for people: tables of sizes and of plans, and a sparkline of speed over tree size."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from edgespec.cli.console import write_lines
from edgespec.cli.rich_console import VisibleConsole
from edgespec.cli.standard_streams import drawing_stream

if TYPE_CHECKING:
    from profiles.schema import Plan, Profile, TemperaturePlan

GIB = 1 << 30
BARS = "▁▂▃▄▅▆▇█"


def write_report(profile: Profile) -> None:
    """Write the whole report to stdout."""
    console = VisibleConsole(
        file=drawing_stream(sys.stdout), highlight=False, markup=False, soft_wrap=True
    )  # names may hold brackets
    machine, pair = profile.machine, profile.pair
    console.print(f"{pair.target} + {pair.draft} on {machine.device_name}, {pair.dtype}"
                  + (f" from {pair.quant}" if pair.quant != "none" else ""))  # fmt: skip
    write_lines(_placement(profile))
    console.print(_costs(profile))
    for plan in profile.plans:
        console.print(_speeds(plan))
        if len(plan.by_size) > 1:
            console.print(f"tokens/s over tree size: {sparkline([found.tokens_per_s for found in plan.by_size])}")
        write_lines(f"T={plan.temperature:g}: {describe(plan.best)}: {plan.why}")
        for found in plan.by_texts:
            write_lines(f"{found.num_texts} texts under way: {describe(found)}: {found.tokens_per_s:.3g} tokens/s*")
        console.print()
    error = profile.reliability.calibration_error
    console.print(f"expected calibration error of the acceptance model: {error:.3f}")


def describe(plan: Plan) -> str:
    """Describe a plan in a few words."""
    if plan.policy == "none":
        return "no tree"
    shape = f"{plan.policy} ({plan.draw})" if plan.draw else plan.policy
    limits = f"{plan.size} nodes, depth {plan.depth}" if plan.policy != "chain" else f"{plan.size} tokens"
    threshold = f", threshold {plan.threshold:.3g}" if plan.threshold else ""
    return f"{shape}, {limits}{threshold}"


def sparkline(values: Sequence[float]) -> str:
    """Draw values as a row of bars, scaled from the lowest to the highest."""
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(BARS[round((value - low) / span * (len(BARS) - 1))] for value in values)


def _placement(profile: Profile) -> str:
    pair, rates = profile.pair, profile.bandwidths
    parts = [f"{pair.resident_layers} of {pair.num_layers} layers resident"]
    for name, rate in (
        ("disk", rates.disk_sequential_per_s),
        ("streamed from disk", rates.disk_streamed_per_s),
        ("copies from pinned RAM", rates.copy_pinned_per_s),
        ("from pageable RAM", rates.copy_pageable_per_s),
    ):
        if rate is not None:
            parts.append(f"{name} {rate / GIB:.2f} GiB/s")
    return "; ".join(parts)


def _costs(profile: Profile) -> Table:
    """Return a table of the seconds that the target's pass and a draft call take, by their rows."""
    table = Table(title=None, box=None, pad_edge=False)
    for name in ("nodes or rows", "pass ms", "spread", "draft call ms"):
        table.add_column(name, justify="right")
    drafts = {timing.count: timing for timing in profile.draft}
    for timing in profile.verify:
        draft = drafts.get(timing.count)
        table.add_row(
            str(timing.count),
            f"{1000 * timing.median_s:.1f}",
            f"{1000 * timing.spread_s:.1f}",
            f"{1000 * draft.median_s:.1f}" if draft else "",
        )
    return table


def _speeds(plan: TemperaturePlan) -> Table:
    """Return a table of the best plan of each size; the chosen one is marked, and stands last if it has a threshold."""
    table = Table(title=f"temperature {plan.temperature:g}", title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    for name in ("size", "policy", "depth", "tok/pass", "ms a step", "tok/s"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    rows = [plan.plain, *plan.by_size]
    is_listed = any(_same(row, plan.best) for row in rows)
    for row in rows if is_listed else [*rows, plan.best]:
        chosen = _same(row, plan.best)
        shown = plan.best if chosen else row
        seconds = shown.measured_step_s or shown.step_s
        policy = f"{shown.policy} {shown.draw}" if shown.draw else shown.policy
        table.add_row(
            "→" if chosen else "",
            str(shown.size),
            policy,
            str(shown.depth),
            f"{shown.tokens:.2f}",
            f"{1000 * seconds:.1f}" + ("" if shown.measured_step_s else "*"),
            f"{shown.tokens_per_s:.1f}",
            style="bold" if chosen else "",
        )
    table.caption = "* predicted; the others were tried"
    table.caption_justify = "left"
    return table


def _same(one: Plan, other: Plan) -> bool:
    names = ("policy", "draw", "size", "depth", "threshold", "branching")
    return all(getattr(one, name) == getattr(other, name) for name in names)
