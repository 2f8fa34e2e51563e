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


def rates_table(
    name: str, source: str, claim: str, trees: dict[str, TreeSettings], sampling: SamplingSettings
) -> PaperTable:
    """The acceptance rates of some trees."""
    return PaperTable(
        name=name,
        source=f"Improving MCSD, {source} (temperature {sampling.temperature:g})",
        claim=claim,
        visit=lambda context: rates(context, trees, sampling),
        show=lambda found: show_rates(list(trees), found),
    )


TABLES = (
    rates_table(
        "mcsd-2",
        "table 2",
        "acceptance rates of one chain 0.17, of 4 x 2 x 2 x 1 0.29, with 2 tokens of the target's 0.47 "
        "(MT-Bench, Llama-2 7B with 68M)",
        METHODS,
        STATIC,
    ),
    rates_table(
        "mcsd-6",
        "table 3 and figure 6",
        "the acceptance rate grows with the number of chains that the target starts, up to 12: 0.74 for 16, "
        "where MCSD has 0.20",
        WIDTHS,
        DYNAMIC,
    ),
    rates_table(
        "mcsd-4",
        "figure 4",
        "a heat map of speed over shapes; the best is 2 x 4 x 3 x 1 x 1",
        SHAPES,
        STATIC,
    ),
)
