"""SpecInfer: branching factors that are learned, at temperature 0."""

import functools
from collections.abc import Sequence
from itertools import accumulate
from typing import TypeAlias

from edgespec.config import SamplingSettings
from edgespec.grow.acceptance import AcceptanceModel
from edgespec.tree.settings import TreeSettings
from scripts.papers.tables.paper_table import Context, PaperTable
from scripts.papers.tables.speeds import lengths_and_layers, show_gain, show_speeds

GREEDY = SamplingSettings()
PAPERS, LIBRARYS = (1, 1, 3, 1, 1, 1, 1, 1), (4, 2, 2, 1)  # branchings: SpecInfer's own, and mcsd's here
DEPTH = 24

Branching: TypeAlias = tuple[int, ...]


def learned_branching(acceptance: Sequence[float], size: int) -> Branching:
    """The branching of at most `size` nodes that promises most tokens by acceptance by rank."""
    reached = list(accumulate(acceptance))  # the chance that one of the k + 1 best children is accepted

    @functools.cache
    def best(width: int, left: int) -> tuple[float, Branching]:
        found: tuple[float, Branching] = (0.0, ())
        for count, chance in enumerate(reached[: left // width], start=1):
            below, factors = best(width * count, left - width * count)
            found = max(found, (chance * (1 + below), (count, *factors)))
        return found

    return best(1, size)[1]


def num_nodes(branching: Branching) -> int:
    """The nodes below the root."""
    return sum(accumulate(branching, lambda above, count: above * count))


@functools.cache
def branchings(measured: AcceptanceModel) -> dict[str, TreeSettings]:
    """The fixed branchings, and trees of as many nodes: a learned one, Sequoia's, and OPT-Tree's."""
    acceptance = measured.rank_acceptance(GREEDY.temperature, "chosen")
    found = {}
    for fixed in (PAPERS, LIBRARYS):
        size = num_nodes(fixed)
        learned = learned_branching(tuple(acceptance), size)
        for kind, branching in (("fixed", fixed), ("learned", learned)):
            name = f"{num_nodes(branching)}, {kind} {' x '.join(map(str, branching))}"
            found[name] = TreeSettings(policy="specinfer", draw="chosen", branching=branching)
        found[f"{size}, Sequoia"] = TreeSettings(policy="sequoia", draw="chosen", size=size, depth=DEPTH)
        found[f"{size}, OPT-Tree"] = TreeSettings(policy="opt-tree", draw="chosen", size=size, depth=DEPTH)
    return found


def lengths_of(context: Context) -> dict[str, tuple[float, float]]:
    """The tokens of a pass with each tree, and its layers."""
    trees = branchings(context.bench.acceptance)
    return dict(zip(trees, lengths_and_layers(context, list(trees.values()), GREEDY), strict=True))


def show_branchings(found: Sequence[dict[str, tuple[float, float]]]) -> list[str]:
    """Speeds, and what learning the branching gains over the fixed one."""
    pairs = [list(of_context.values()) for of_context in found]
    return [
        *show_speeds("nodes and tree", list(found[0]), pairs),
        "",
        show_gain("Learned over SpecInfer's own", [1], [0], pairs),
        show_gain("Learned over 4 x 2 x 2 x 1", [5], [4], pairs),
    ]


TABLES = (
    PaperTable(
        name="specinfer-branching",
        source="SpecInfer, section 3, expansion-based speculation",
        claim="trees have a fixed number of children by layer; which numbers are best is left open",
        visit=lengths_of,
        show=show_branchings,
    ),
)
