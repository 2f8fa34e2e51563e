"""A profile as a picture: what passes cost over their rows, and the tokens that trees yield over their size."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.cli.profile.report import speeds_of
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
    """Draw the milliseconds of a pass over its rows."""
    for curve in profile.passes:
        texts = "1 text" if curve.num_texts == 1 else f"{curve.num_texts} texts"
        rows, seconds = zip(*((point.rows, 1000 * point.seconds) for point in curve.points), strict=True)
        axes.plot(rows, seconds, marker="o", markersize=3, label=f"a pass of {texts}")
    axes.set(xscale="log", yscale="log", xlabel="rows", ylabel="milliseconds")
    axes.set_title("what a pass costs", fontsize=10)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)


def _draw_speeds(axes: Any, profile: Profile) -> None:
    """Draw tokens a pass (dashed) and tokens a second over the size of trees, a colour for each temperature."""
    tokens = axes.twinx()
    for plan in (plan for plan in profile.plans if plan.best.by_size):
        sizes, per_s = zip(*speeds_of(profile, plan.best), strict=True)
        (line,) = axes.plot(sizes, per_s, marker=".", label=f"temperature {plan.temperature:g}")
        tokens.plot(sizes, [at.tokens for at in plan.best.by_size], linestyle=":", color=line.get_color())
        if plan.best.pays:
            axes.plot(plan.best.size, plan.best.trees_per_s, marker="*", markersize=13, color=line.get_color())
    plain_per_s = profile.plans[0].best.plain_per_s
    axes.axhline(plain_per_s, color="grey", linestyle="--", linewidth=1, label="plain decoding")
    axes.set(xscale="log", xlabel="nodes of a tree", ylabel="tokens a second", ylim=(0, None))
    tokens.set(ylabel="tokens a pass (dotted)", ylim=(0, None))
    axes.set_title("tokens over the size of trees, and where they ended (stars)", fontsize=10)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
