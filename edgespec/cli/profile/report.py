"""A profile for people: rates, seconds of passes, tokens and speed over the size of trees, and where trees ended."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from edgespec.cli.console import write_lines
from edgespec.cli.rich_console import VisibleConsole
from edgespec.cli.standard_streams import drawing_stream

if TYPE_CHECKING:
    from profiles.schema import PassCurve, Plan, Profile, TemperaturePlan

GIB = 1 << 30
BARS = "▁▂▃▄▅▆▇█"


def write_report(profile: Profile) -> None:
    """Write the whole report to stdout."""
    console = VisibleConsole(
        file=drawing_stream(sys.stdout), highlight=False, markup=False, soft_wrap=True
    )  # names may hold brackets
    machine, pair = profile.machine, profile.pair
    quant = f" from {pair.quant} weights" if pair.quant != "none" else ""
    write_lines(f"{pair.target} + {pair.draft} on {machine.device_name}, {pair.dtype}{quant}")
    write_lines(_placement(profile))
    for curve in profile.passes:
        console.print(_passes(curve))
    growth = profile.growth
    write_lines(
        f"a tree takes {1000 * growth.tree_s:.2g} ms to grow, {1000 * growth.layer_s:.2g} ms more for each layer, "
        f"and {1000 * growth.node_s:.2g} ms for each node"
    )
    for plan in profile.plans:
        speeds = speeds_of(profile, plan.best)
        console.print(_speeds(plan, speeds))
        if len(speeds) > 1:
            console.print(f"tokens/s over tree size: {sparkline([per_s for _, per_s in speeds])}")
        write_lines(f"T={plan.temperature:g}: {describe(plan.best)}: {plan.why}")
        for found in plan.by_texts:
            write_lines(f"{found.num_texts} texts under way: {describe(found)}: {found.tokens_per_s:.3g} tokens/s")
        console.print()
    if profile.calibration_error is not None:
        console.print(f"expected calibration error of the acceptance model: {profile.calibration_error:.3f}")


def describe(plan: Plan) -> str:
    """Describe a plan in a few words."""
    if not plan.pays:
        return "no tree"
    nodes = "1 node" if plan.size == 1 else f"{plan.size} nodes"
    threshold = f", threshold {plan.threshold:.3g}" if plan.threshold else ""
    return f"{plan.policy} trees of at most {nodes}{threshold}"


def speeds_of(profile: Profile, plan: Plan) -> list[tuple[int, float]]:
    """Return the sizes that trees of this plan have had, and the tokens a second that each yields."""
    from edgespec.tuning.memory import known_costs
    from edgespec.tuning.tokens_by_size import MeanTree

    costs = known_costs(profile)
    return [
        (at.size, plan.num_texts * at.tokens / costs.of(MeanTree(at.tokens, at.nodes, at.layers), plan.num_texts))
        for at in plan.by_size
    ]


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


def _passes(curve: PassCurve) -> Table:
    """Return a table of the seconds of a pass over its rows."""
    several = f", {curve.num_texts} texts share it" if curve.num_texts > 1 else ""
    table = Table(title=f"a pass of the target{several}", title_justify="left", box=None, pad_edge=False)
    for name in ("rows", "ms"):
        table.add_column(name, justify="right")
    for point in curve.points:
        table.add_row(f"{point.rows:.0f}", f"{1000 * point.seconds:.1f}")
    return table


def _speeds(plan: TemperaturePlan, speeds: Sequence[tuple[int, float]]) -> Table:
    """Return a table of what trees of each size yield; the size where they ended is marked."""
    table = Table(title=f"temperature {plan.temperature:g}", title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    for name in ("size", "nodes", "layers", "tok/pass", "tok/s"):
        table.add_column(name, justify="right")
    best = plan.best
    table.add_row("" if best.pays else "→", "0", "0", "0", "1.00", f"{best.plain_per_s:.1f}")
    for at, (_, per_s) in zip(best.by_size, speeds, strict=True):
        chosen = best.pays and at.size == best.size
        cells = (str(at.size), f"{at.nodes:.1f}", f"{at.layers:.1f}", f"{at.tokens:.2f}", f"{per_s:.1f}")
        table.add_row("→" if chosen else "", *cells, style="bold" if chosen else "")
    return table
