"""OPT-Tree: the expected acceptance length, its threshold, and trees of fixed shapes beside it."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from edgespec.config import SamplingSettings
from edgespec.grow.opt_tree import stop_gain_at
from edgespec.tree.settings import TreeSettings
from scripts.papers.compare_policies import resampled_places
from scripts.papers.tables.paper_table import (
    Context,
    PaperTable,
    bin_names,
    in_bins,
    in_words,
    markdown,
    shares,
    with_interval,
)
from scripts.papers.tables.speeds import COSTS, Found, lengths_and_layers, show_speeds, speeds_and_drawn

GREEDY = SamplingSettings()
SAMPLINGS = (GREEDY, SamplingSettings(temperature=1.0))  # of the thresholds that follow from a cost
SIZE = 50  # nodes of the paper's trees
LONGEST = 12  # expected acceptance length that has a row of its own
STOP_GAINS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
FIXED = {
    "binary, depth 4": TreeSettings(policy="mcsd", branching=(2, 2, 2, 2), draw="chosen"),
    "EAGLE-1's": TreeSettings(policy="static", tree_file=Path("eagle-1"), draw="chosen"),
    "Medusa's": TreeSettings(policy="static", tree_file=Path("medusa"), draw="chosen"),
}


def opt_tree(size: int, stop_gain: float = 0.0) -> TreeSettings:
    """OPT-Tree as published: the draft as it is, at temperature 1."""
    return TreeSettings(policy="opt-tree", draw="chosen", size=size, stop_gain=stop_gain, draft_temperature=1.0)


def expected_and_actual(context: Context) -> tuple[float, float]:
    """E(A), the sum of the path probabilities with the root's, and A, the root and the nodes that were accepted."""
    tree = context.grow(opt_tree(SIZE), GREEDY)
    assert tree.scores is not None
    return 1.0 + float(tree.scores[1:].sum()), 1.0 + context.num_accepted(tree, GREEDY)


def show_lengths(found: Sequence[tuple[float, float]]) -> list[str]:
    """A row for each rounded E(A), and how the two go together."""
    both = torch.tensor(found, dtype=torch.float64)  # [contexts, 2]
    table = [["E(A)", "trees", "mean A"]]
    for length in range(1, LONGEST + 1):
        of_row = both[(both[:, 0].round() == length) | ((length == LONGEST) & (both[:, 0] > LONGEST)), 1].tolist()
        name = f"{length} or more" if length == LONGEST else str(length)
        table.append([name, str(len(of_row)), in_words(of_row) if len(of_row) > 1 else "-"])
    # Correlations are of whole samples, not means of contexts.
    generator = torch.Generator().manual_seed(0)
    drawn = torch.stack([torch.corrcoef(both[some].T)[0, 1] for some in resampled_places(len(both), generator)])
    return [
        *markdown(table),
        "",
        f"Correlation {with_interval(torch.corrcoef(both.T)[0, 1], drawn)}; "
        f"mean E(A) {in_words(both[:, 0].tolist())}, mean A {in_words(both[:, 1].tolist())}.",
    ]


def accepted_by_probability(context: Context) -> Tensor:
    """Of the children of every accepted node: sums [bins, 2] of those accepted, by the draft's probability."""
    tree = context.grow(opt_tree(SIZE), GREEDY)
    assert tree.scores is not None
    path = context.path(tree, GREEDY)
    tried = [node for node, parent in enumerate(tree.parents.tolist()) if parent in path]
    nodes = torch.tensor(tried)
    scores = torch.cat([torch.ones(1), tree.scores[1:].float()])
    q = scores[nodes] / scores[tree.parents[nodes]]
    is_accepted = torch.tensor([node in path for node in tried]).double()
    return in_bins(q, is_accepted, torch.ones(len(tried)))


def show_accepted(found: Sequence[Tensor]) -> list[str]:
    """A row a bin of q."""
    counts = torch.stack(list(found)).sum(0)[:, 1].int().tolist()
    return markdown([["q", "nodes", "accepted"], *zip(bin_names(), map(str, counts), shares(found), strict=True)])


def lengths_by_stop_gain(context: Context) -> list[tuple[float, float]]:
    """For each threshold: A, and the layers that were drafted."""
    return lengths_and_layers(context, [opt_tree(SIZE, stop_gain) for stop_gain in STOP_GAINS], GREEDY)


def lengths_by_cost(context: Context) -> list[list[tuple[float, float]]]:
    """For each sampling: A and the layers at each threshold, then at the one of each cost of the draft."""
    gains = (*STOP_GAINS, *map(stop_gain_at, COSTS))
    trees = [TreeSettings(policy="opt-tree", size=SIZE, stop_gain=gain) for gain in gains]
    return [lengths_and_layers(context, trees, sampling) for sampling in SAMPLINGS]


def show_by_cost(found: Sequence[list[list[tuple[float, float]]]]) -> list[str]:
    """A row a sampling and a cost: the threshold that follows from the cost, beside none and beside the best of all."""
    table = [["temperature", "mu", "delta of mu", "speed", "over delta 0", "best delta", "over the best"]]
    for number, sampling in enumerate(SAMPLINGS):
        for place, cost in enumerate(COSTS):
            own: Found = [of_context[number] for of_context in found]
            speeds, drawn = speeds_and_drawn(own, cost)  # [trees], [bootstraps, trees]
            followed, best = len(STOP_GAINS) + place, int(speeds[: len(STOP_GAINS)].argmax())
            words = [
                with_interval(speeds[followed] / speeds[other], drawn[:, followed] / drawn[:, other], digits=3)
                for other in (0, best)
            ]
            speed = with_interval(speeds[followed], drawn[:, followed])
            table.append([f"{sampling.temperature:g}", f"{cost:g}", f"{stop_gain_at(cost):g}", speed, words[0],
                          f"{STOP_GAINS[best]:g}", words[1]])  # fmt: skip
    return markdown(table)


def lengths_of_shapes(context: Context) -> list[tuple[float, float]]:
    """For each fixed shape: its A, and that of an OPT-Tree of as many nodes."""
    found = []
    for shape in FIXED.values():
        trees = (shape, opt_tree(shape.num_nodes))
        both = [context.num_accepted(context.grow(tree, GREEDY), GREEDY) for tree in trees]
        found.append((1.0 + both[0], 1.0 + both[1]))
    return found


def show_shapes(found: Sequence[list[tuple[float, float]]]) -> list[str]:
    """A row a shape, with the difference at the same contexts."""
    table = [["shape", "nodes", "A", "OPT-Tree's A", "more"]]
    for (name, shape), pairs in zip(FIXED.items(), zip(*found, strict=True), strict=True):
        fixed, adaptive = ([pair[side] for pair in pairs] for side in (0, 1))
        more = [after - before for before, after in pairs]
        table.append([name, str(shape.num_nodes), in_words(fixed), in_words(adaptive), in_words(more)])
    return markdown(table)


TABLES = (
    PaperTable(
        name="opt-tree-5",
        source="OPT-Tree, figure 5",
        claim="the larger E(A), the larger A, about along the diagonal",
        visit=expected_and_actual,
        show=show_lengths,
    ),
    PaperTable(
        name="opt-tree-11",
        source="OPT-Tree, figure 11",
        claim="how often a token is accepted grows with the draft's probability",
        visit=accepted_by_probability,
        show=show_accepted,
    ),
    PaperTable(
        name="opt-tree-8",
        source="OPT-Tree, figure 8",
        claim="A falls as delta grows; speed is best at a delta between mu and 1",
        visit=lengths_by_stop_gain,
        show=lambda found: show_speeds("delta", [f"{gain:g}" for gain in STOP_GAINS], found),
    ),
    PaperTable(
        name="opt-tree-delta",
        source="OPT-Tree, section 4.4, with edgespec's own drafts",
        claim="delta follows from mu",
        visit=lengths_by_cost,
        show=show_by_cost,
    ),
    PaperTable(
        name="opt-tree-1",
        source="OPT-Tree, table 1",
        claim="OPT-Tree accepts more than binary trees and EAGLE's: 2.58 against 2.12 and 2.47 (7B with 68M), "
        "4.88 against 3.95 and 4.23 (7B with 1B)",
        visit=lengths_of_shapes,
        show=show_shapes,
    ),
)
