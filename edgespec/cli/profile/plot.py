"""A profile as a picture: what passes cost over their rows; what trees of each size yield, and how fast they are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.cli.profile.report import speeds_of
from edgespec.errors import EdgespecError

if TYPE_CHECKING:
    from profiles.schema import Profile


def draw_profile(profile: Profile, path: Path) -> None:
    """Draw the profile in three panels; raises EdgespecError where the file cannot be written."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import NullLocator

    figure, (costs, tokens, speeds) = pyplot.subplots(1, 3, figsize=(15, 4.4), layout="constrained")
    _draw_costs(costs, profile)
    _draw_trees(tokens, speeds, profile)
    for axes in (costs, tokens, speeds):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    costs.yaxis.set_major_formatter("{x:g}")
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
        rows, milliseconds = zip(*((point.rows, 1000 * point.seconds) for point in curve.points), strict=True)
        axes.plot(rows, milliseconds, marker="o", markersize=3, label=f"a pass of {texts}")
    axes.set_yscale("log", base=2)
    axes.set(xlabel="rows of a pass", ylabel="milliseconds")
    axes.set_title("What a pass costs", fontsize=10)


def _draw_trees(tokens: Any, speeds: Any, profile: Profile) -> None:
    """Draw tokens a pass and tokens a second over the size of trees, a colour for each temperature."""
    for plan in profile.plans:
        best, label = plan.best, f"temperature {plan.temperature:g}"
        per_s = speeds_of(profile, best)
        sizes = [size for size, _ in per_s]
        (line,) = tokens.plot(sizes, [at.tokens for at in best.by_size], marker=".", label=label)
        color = line.get_color()
        speeds.plot(sizes, [speed for _, speed in per_s], marker=".", color=color, label=label)
        speeds.axhline(best.plain_per_s, color=color, linestyle="--", linewidth=1)
        if best.pays:
            speeds.plot(best.size, best.trees_per_s, marker="*", markersize=13, color=color)
    tokens.set(xlabel="largest size of a tree in nodes", ylabel="tokens a pass", ylim=(0, None))
    tokens.set_title("What trees yield", fontsize=10)
    speeds.set(xlabel="largest size of a tree in nodes", ylabel="tokens a second", ylim=(0, None))
    speeds.set_title("How fast they are (star: the size in use, dashed: plain decoding)", fontsize=10)
