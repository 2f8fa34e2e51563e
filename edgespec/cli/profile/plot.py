"""A profile as a picture: what passes and drafting cost over tree size, and the tokens a second that follow."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.errors import EdgespecError

if TYPE_CHECKING:
    from profiles.schema import Profile


def draw_profile(profile: Profile, path: Path) -> None:
    """Draw the profile in two panels; raises EdgespecError where the file cannot be written."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (costs, speeds) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    _draw_costs(costs, profile)
    _draw_speeds(speeds, profile)
    figure.suptitle(f"{profile.pair.target} + {profile.pair.draft} on {profile.machine.device_name}", fontsize=10)
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise EdgespecError("E_OUTPUT", f"'{path}' cannot be written ({error}).", "Choose another file.") from error
    finally:
        pyplot.close(figure)


def _draw_costs(axes: Any, profile: Profile) -> None:
    """Draw milliseconds over nodes, with the spread of the repeats."""
    curves = {"target: a pass over the tree": profile.verify, "draft: a call of so many rows": profile.draft}
    for label, timings in curves.items():
        axes.errorbar(
            [max(timing.count, 0.5) for timing in timings],
            [1000 * timing.median_s for timing in timings],
            yerr=[500 * timing.spread_s for timing in timings],
            marker="o",
            markersize=3,
            capsize=2,
            label=label,
        )
    axes.set(xscale="log", yscale="log", xlabel="nodes (at the left edge: none)", ylabel="milliseconds")
    axes.set_title("what a step costs", fontsize=10)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)


def _draw_speeds(axes: Any, profile: Profile) -> None:
    """Draw the best plan of each size in tokens a second, a line for each temperature, with the chosen plan marked."""
    for plan in profile.plans:
        rows = [row for row in plan.by_size if row.size > 0]
        (line,) = axes.plot(
            [row.size for row in rows], [row.tokens / row.step_s for row in rows], marker=".",
            label=f"temperature {plan.temperature:g}",
        )  # fmt: skip
        best = plan.best
        if best.policy != "none":
            axes.plot(best.nodes, best.tokens_per_s, marker="*", markersize=13, color=line.get_color())
    plain = profile.plans[0].plain
    axes.axhline(plain.tokens_per_s, color="grey", linestyle="--", linewidth=1, label="plain decoding")
    axes.set(xscale="log", xlabel="nodes of a tree", ylabel="tokens a second", ylim=(0, None))
    axes.set_title("speed: predicted (lines), chosen and tried (stars)", fontsize=10)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
