"""Improving Multi-candidate Speculative Decoding: several candidates, and branches that the target starts.

The acceptance rate of a pass is the number of the draft's tokens that were accepted, over the longest path of the
tree. Trees that the target starts in several places accept more because the longest branch wins: what they write has no
longer the target's distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from edgespec.config import SamplingSettings
from edgespec.tree.settings import TreeSettings
from scripts.paper_tables.paper_table import Context, PaperTable, in_words, markdown

NEW_TOKENS = 24
STATIC = SamplingSettings(temperature=0.7)
DYNAMIC = SamplingSettings(temperature=1.0)


def tree(width: int, *branching: int) -> TreeSettings:
    """A tree of `width` tokens of the target's, and so many children of each node of the draft's layers."""
    return TreeSettings(policy="mcsd", branching=branching, target_width=width, draw="sampled")


METHODS = {
    "one chain of 4": tree(1, 1, 1, 1, 1),
    "4 x 2 x 2 x 1": tree(1, 4, 2, 2, 1),
    "4 x 3 x 1 x 1": tree(1, 4, 3, 1, 1),
    "8 x 6 x 1 x 1": tree(1, 8, 6, 1, 1),
    "2 started by the target, 4 x 3 x 1 x 1": tree(2, 4, 3, 1, 1),
}
WIDTHS = {
    **{f"{width} x 5, all started by the target": tree(width, 1, 1, 1, 1, 1) for width in (1, 2, 4, 8, 12, 16)},
    "16 x 5, started by the draft": TreeSettings(policy="mcsd", fork=(16, 5), draw="sampled"),
}
FIRST, SECOND = (2, 4, 8), (1, 2, 3)
SHAPES = {f"{first} x {second} x 1 x 1": tree(1, first, second, 1, 1) for first, second in product(FIRST, SECOND)}


def rates(context: Context, trees: dict[str, TreeSettings], sampling: SamplingSettings) -> list[float]:
    """The acceptance rate of each tree in a text that continues the context."""
    found = []
    for settings in trees.values():
        engine = context.bench.engine
        engine.use_tree(settings)
        result = engine.generate(
            context.bench.ids, max_new_tokens=NEW_TOKENS, sampling=sampling, seed=context.seed + context.number
        )
        # The last pass has no room for all of the tree.
        steps = result.passes[:-1] or result.passes
        length = settings.num_layers - (settings.target_width > 1)
        found.append(sum(step.num_accepted for step in steps) / (length * len(steps)))
    return found


def show_rates(names: Sequence[str], found: Sequence[list[float]]) -> list[str]:
    """A row a tree."""
    columns = zip(*found, strict=True)
    table = [[name, in_words(column)] for name, column in zip(names, columns, strict=True)]
    return markdown([["tree", "acceptance rate"], *table])


TABLES = (
    PaperTable(
        name="mcsd-2",
        source="Improving MCSD, table 2 (temperature 0.7)",
        claim="acceptance rates of one chain 0.17, of 4 x 2 x 2 x 1 0.29, with 2 tokens of the target's 0.47 "
        "(MT-Bench, Llama-2 7B with 68M)",
        visit=lambda context: rates(context, METHODS, STATIC),
        show=lambda found: show_rates(list(METHODS), found),
    ),
    PaperTable(
        name="mcsd-6",
        source="Improving MCSD, table 3 and figure 6 (temperature 1)",
        claim="the acceptance rate grows with the number of chains that the target starts, up to 12: 0.74 for 16, "
        "where MCSD has 0.20",
        visit=lambda context: rates(context, WIDTHS, DYNAMIC),
        show=lambda found: show_rates(list(WIDTHS), found),
    ),
    PaperTable(
        name="mcsd-4",
        source="Improving MCSD, figure 4 (temperature 0.7)",
        claim="a heat map of speed over shapes; the best is 2 x 4 x 3 x 1 x 1",
        visit=lambda context: rates(context, SHAPES, STATIC),
        show=lambda found: show_rates(list(SHAPES), found),
    ),
)
