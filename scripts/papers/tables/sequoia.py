"""Sequoia's choice of size and depth for a machine: what it promises, and what its trees yield.

The choice is the most G(n, d) / (t(n) + d c), where G is what acceptance by rank promises, t(n) a pass over n nodes
and c a draft call. Acceptance by rank was measured on other modules than those of the contexts.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from edgespec.config import SamplingSettings
from edgespec.grow.acceptance import AcceptanceModel
from edgespec.grow.sequoia import SequoiaTable, best_limits, sequoia_table
from edgespec.tree.settings import TreeSettings
from scripts.papers.tables.paper_table import Context, PaperTable, in_words, markdown
from scripts.papers.tables.speeds import COSTS, lengths_and_layers

GREEDY = SamplingSettings()
SIZE, DEPTH, WIDTH = 256, 24, 16  # of the largest trees
NODE_COSTS = (0.0, 0.01, 0.05)  # of a pass: a node more, where computing counts
CLOCKS = tuple((node_s, layer_s) for node_s in NODE_COSTS for layer_s in COSTS)
Limits = tuple[int, int]  # size, depth


@functools.cache
def expected(acceptance: AcceptanceModel) -> SequoiaTable:
    """What acceptance by rank promises of every size and depth."""
    rates = acceptance.rank_acceptance(GREEDY.temperature, "chosen")
    return sequoia_table(rates, size=SIZE, depth=DEPTH, max_children=WIDTH)


def seconds_of(node_s: float, layer_s: float) -> Tensor:
    """A step with trees of every depth and size [DEPTH, SIZE], in passes without a tree."""
    sizes, layers = torch.arange(1.0, SIZE + 1), torch.arange(1.0, DEPTH + 1)[:, None]
    return (1 + node_s * sizes + layer_s * layers).double()


@functools.cache
def chosen(acceptance: AcceptanceModel) -> dict[tuple[float, float], Limits]:
    """Sequoia's size and depth for every clock."""
    return {clock: best_limits(expected(acceptance), seconds_of(*clock)) for clock in CLOCKS}


def tree_of(size: int, depth: int) -> TreeSettings:
    """Sequoia's tree within the limits."""
    return TreeSettings(policy="sequoia", draw="chosen", size=size, depth=depth, max_children=WIDTH)


@dataclass(frozen=True, slots=True)
class Choice:
    """What Sequoia chooses and promises for a clock, and the tokens of a pass with its tree."""

    limits: Limits
    promised: float
    tokens: float


def choices(context: Context) -> dict[tuple[float, float], Choice]:
    """Sequoia's choice for each clock."""
    acceptance = context.bench.acceptance
    by_clock = chosen(acceptance)
    lengths = lengths_and_layers(context, [tree_of(*limits) for limits in by_clock.values()], GREEDY)
    return {
        clock: Choice(limits, expected(acceptance).expected_tokens(*limits), tokens)
        for (clock, limits), (tokens, _) in zip(by_clock.items(), lengths, strict=True)
    }


def show(found: Sequence[dict[tuple[float, float], Choice]]) -> list[str]:
    """A row a clock: what Sequoia chooses, promises and yields."""
    table = [["a node", "mu", "nodes x depth", "promised tokens", "tokens", "promised speed", "speed"]]
    for clock, choice in found[0].items():
        (node_s, layer_s), (size, depth) = clock, choice.limits
        lengths = torch.tensor([of_context[clock].tokens for of_context in found], dtype=torch.float64)  # [contexts]
        step_s = 1 + node_s * size + layer_s * depth
        table.append([
            f"{node_s:g}", f"{layer_s:g}", f"{size} x {depth}", f"{choice.promised:.2f}", in_words(lengths.tolist()),
            f"{choice.promised / step_s:.2f}", in_words((lengths / step_s).tolist()),
        ])  # fmt: skip
    return markdown(table)


TABLES = (
    PaperTable(
        name="sequoia",
        source="Sequoia, section 4.3, the choice of size and depth",
        claim="the tree of most G(n, d) / (t(n) + d c) is the fastest on a machine",
        visit=choices,
        show=show,
    ),
)
