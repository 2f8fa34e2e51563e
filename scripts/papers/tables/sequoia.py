"""Sequoia's choice of size and depth for a machine, beside what a profile chooses from trees that were grown.

The paper's own: the most G(n, d) / (t(n) + d c), where G is what acceptance by rank promises, t(n) a pass over n nodes
and c a draft call. A profile looks at the same grid, and counts what trees at its texts yield. Acceptance by rank was
measured on other modules than those of the contexts.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from edgespec.config import SamplingSettings
from edgespec.grow.acceptance import default_acceptance
from edgespec.grow.sequoia import SequoiaTable, best_limits, sequoia_table
from edgespec.tree.settings import TreeSettings
from edgespec.tree.token_tree import depths, product_on_path
from edgespec.tune.contest import DEPTHS, SIZES
from edgespec.tune.entrants import rank_values
from profiles.cost import Curve, GrowthCost, StepCosts
from profiles.tuner import Entrant, TreeSample, tabulate
from scripts.papers.tables.paper_table import Context, PaperTable, in_words, markdown, resampled, with_interval
from scripts.papers.tables.speeds import COSTS, lengths_and_layers

GREEDY = SamplingSettings()
SIZE, DEPTH, WIDTH = 256, 24, 16  # of the largest trees
NODE_COSTS = (0.0, 0.01, 0.05)  # of a pass: a node more, where computing counts
CLOCKS = tuple((node_s, layer_s) for node_s in NODE_COSTS for layer_s in COSTS)
Limits = tuple[int, int]  # size, depth


@functools.cache
def expected() -> SequoiaTable:
    """What acceptance by rank promises of every size and depth."""
    rates = default_acceptance().rank_acceptance(GREEDY.temperature, "chosen")
    return sequoia_table(rates, size=SIZE, depth=DEPTH, max_children=WIDTH)


def seconds_of(node_s: float, layer_s: float) -> Tensor:
    """A step with trees of every depth and size [DEPTH, SIZE], in passes without a tree."""
    sizes, layers = torch.arange(1.0, SIZE + 1), torch.arange(1.0, DEPTH + 1)[:, None]
    return (1 + node_s * sizes + layer_s * layers).double()


@functools.cache
def chosen() -> dict[tuple[float, float], Limits]:
    """Sequoia's size and depth for every clock."""
    return {clock: best_limits(expected(), seconds_of(*clock)) for clock in CLOCKS}


def tree_of(size: int, depth: int) -> TreeSettings:
    """Sequoia's tree within the limits."""
    return TreeSettings(policy="sequoia", draw="chosen", size=size, depth=depth, max_children=WIDTH)


def lengths_and_sample(context: Context) -> tuple[list[tuple[float, float]], TreeSample]:
    """Tokens and layers of Sequoia's tree for each clock, and the largest tree as a profile sees it."""
    lengths = lengths_and_layers(context, [tree_of(*limits) for limits in chosen().values()], GREEDY)
    tree = context.grow(tree_of(SIZE, DEPTH), GREEDY)
    values = torch.zeros(tree.num_nodes, dtype=torch.float64)
    values[context.path(tree, GREEDY)] = 1.0
    by_rank = torch.tensor(rank_values(default_acceptance(), temperature=GREEDY.temperature, draw="chosen")).double()
    by_rank = by_rank[tree.ranks]
    by_rank[0] = 1.0
    sample = TreeSample.from_nodes(
        scores=product_on_path(by_rank, tree.parents)[1:].numpy(),
        values=values[1:].numpy(),
        depths=depths(tree.parents)[1:].numpy(),
        parents=(tree.parents[1:] - 1).numpy(),
    )
    return lengths, sample


def show(found: Sequence[tuple[list[tuple[float, float]], TreeSample]]) -> list[str]:
    """A row a clock: what Sequoia chooses, promises and yields, then what a profile chooses, and how they compare."""
    entrant = Entrant(
        policy="sequoia",
        draw="chosen",
        samples=[sample for _, sample in found],
        growth=GrowthCost(base_s=0.0, layer_s=0.0, node_s=0.0, rows_per_inner=1.0),
    )
    table = [["a node", "mu", "Sequoia's nodes x depth", "promised tokens", "tokens", "promised speed", "speed",
              "the profile's nodes x depth", "speed", "over Sequoia's"]]  # fmt: skip
    for place, ((node_s, layer_s), (size, depth)) in enumerate(chosen().items()):
        lengths = torch.tensor([trees[place] for trees, _ in found], dtype=torch.float64)  # [contexts, 2]
        step_s = 1 + node_s * size + layer_s * depth
        speeds = lengths[:, 0] / step_s
        limits, others = _profiles(entrant, node_s, layer_s)  # [contexts, 2]: tokens and seconds
        rates = [means[..., 0] / means[..., 1] for means in (others.mean(0), resampled(others))]
        ratios = [rate / means for rate, means in zip(rates, (speeds.mean(), resampled(speeds)), strict=True)]
        promised = expected().expected_tokens(size, depth)
        table.append([
            f"{node_s:g}", f"{layer_s:g}", f"{size} x {depth}", f"{promised:.2f}", in_words(lengths[:, 0].tolist()),
            f"{promised / step_s:.2f}", in_words(speeds.tolist()), f"{limits[0]} x {limits[1]}",
            with_interval(*rates), with_interval(*ratios, digits=3),
        ])  # fmt: skip
    return markdown(table)


def _profiles(entrant: Entrant, node_s: float, layer_s: float) -> tuple[Limits, Tensor]:
    """The limits that a profile takes by its samples, and what these yield: tokens and seconds, [contexts, 2]."""
    costs = StepCosts(
        verify=Curve((0.0, float(SIZE)), (1.0, 1.0 + node_s * SIZE)), draft=Curve((1.0,), (layer_s,)),
        rest_s=0.0, plain_step_s=1.0,
    )  # fmt: skip
    plans = tabulate(entrant, costs, sizes=[size for size in SIZES if size <= SIZE], depths=DEPTHS)
    best = int((plans.tokens.mean(0) / plans.seconds.mean(0)).argmax())
    return plans.limits[best], torch.stack(
        [torch.from_numpy(part[:, best]) for part in (plans.tokens, plans.seconds)], -1
    )


TABLES = (
    PaperTable(
        name="sequoia",
        source="Sequoia, section 4.3, the choice of size and depth",
        claim="the tree of most G(n, d) / (t(n) + d c) is the fastest on a machine",
        visit=lengths_and_sample,
        show=show,
    ),
)
