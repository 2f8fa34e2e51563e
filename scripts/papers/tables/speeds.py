"""Tokens a second of trees, by what a draft call costs: a pass takes one, and each of the tree's layers mu."""

from collections.abc import Sequence

import torch
from torch import Tensor

from edgespec.config import SamplingSettings
from edgespec.tree.settings import TreeSettings
from edgespec.tree.token_tree import depths
from scripts.papers.tables.paper_table import Context, in_words, markdown, resampled, with_interval

COSTS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5)  # mu: seconds of a draft call over those of a target pass
Found = Sequence[Sequence[tuple[float, float]]]  # [contexts][trees]: the tokens of a pass, and the tree's layers


def lengths_and_layers(
    context: Context, trees: Sequence[TreeSettings], sampling: SamplingSettings
) -> list[tuple[float, float]]:
    """The tokens of a pass with each tree, and its layers."""
    found = []
    for settings in trees:
        tree = context.grow(settings, sampling)
        found.append((1.0 + context.num_accepted(tree, sampling), float(depths(tree.parents).max())))
    return found


def show_speeds(heading: str, names: Sequence[str], found: Found) -> list[str]:
    """A row a tree, a column a cost of the draft: tokens a second over plain decoding's; the best ones are bold."""
    every = torch.tensor(found, dtype=torch.float64)  # [contexts, trees, 2]
    by_cost = [speeds_and_drawn(found, cost) for cost in COSTS]
    table = [[heading, "tokens a pass", "layers", *(f"speed, mu {cost:g}" for cost in COSTS)]]
    for row, name in enumerate(names):
        cells = []
        for speeds, drawn in by_cost:
            words = with_interval(speeds[row], drawn[:, row])
            cells.append(f"**{words}**" if speeds.argmax() == row else words)
        table.append([name, in_words(every[:, row, 0].tolist()), f"{every[:, row, 1].mean():.1f}", *cells])
    return markdown(table)


def speeds_and_drawn(found: Found, cost: float) -> tuple[Tensor, Tensor]:
    """The tokens a second of each tree [trees], and those of contexts that are drawn anew [bootstraps, trees]."""
    every = torch.tensor(found, dtype=torch.float64)  # [contexts, trees, 2]
    speeds, drawn = (means[..., 0] / (1 + cost * means[..., 1]) for means in (every.mean(0), resampled(every)))
    return speeds, drawn


def show_gain(what: str, first: Sequence[int], second: Sequence[int], found: Found) -> str:
    """How much faster the best of the first trees is than the best of the second ones, at each cost of the draft."""
    words = []
    for cost in COSTS:
        ratio, drawn = (
            speeds[..., list(first)].amax(-1) / speeds[..., list(second)].amax(-1)
            for speeds in speeds_and_drawn(found, cost)
        )
        words.append(f"{with_interval(ratio, drawn, digits=3)} at mu {cost:g}")
    return f"{what}: {', '.join(words)}."
