"""What is known of a draft before its first tree: how it is called, what a call takes, and how far its trees may go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from edgespec.draft.calls import BY_LAYER, DraftCalls
from edgespec.grow.sequoia import SequoiaTable, power_law, sequoia_table
from edgespec.tuning.draft_worth import DraftWorth
from edgespec.tuning.tokens_by_size import MeanTree

USUAL_RATE = 0.6  # of a first guess that is right, where no acceptance was measured
USUAL_SIZES = (1, 2, 4, 8, 16)
USUAL_DEPTH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstGrowth:
    """What a small tree took when the draft was loaded."""

    layers: int
    nodes: int
    seconds: float
    row_s: float  # of reading a token that stands before the root


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftFacts:
    """A draft, as far as it is known beforehand."""

    calls: DraftCalls = BY_LAYER
    growth: FirstGrowth | None = None  # None: its first tree shows it
    rates: Callable[[float], Sequence[float]] = lambda _temperature: ()  # acceptance by rank, of drafts as usual
    target_streams: bool = False  # whether passes wait for weights: then a prompt's takes as long as any

    def usual_trees(self, temperature: float) -> tuple[MeanTree, ...]:
        """Return trees of few sizes and depths as usual drafts grow them; none where a call's seconds are not known."""
        if self.growth is None:
            return ()
        table = self._usual_table(temperature)
        return tuple(
            MeanTree(table.expected_tokens(nodes, depth), nodes, depth)
            for nodes in USUAL_SIZES
            for depth in range(1, min(nodes, USUAL_DEPTH, self.calls.deepest or USUAL_DEPTH) + 1)
        )

    def first_worth(self, temperature: float) -> DraftWorth:
        """Return what the first tree is worth beside looked up text, if it is as usual ones are."""
        first = self.growth
        if first is None:
            return DraftWorth()
        table = self._usual_table(temperature)
        size = min(first.nodes, USUAL_SIZES[-1])
        tokens = [table.expected_tokens(size, depth) for depth in range(min(first.layers, USUAL_DEPTH) + 1)]
        return DraftWorth([more - less for less, more in pairwise(tokens)], nodes=first.nodes, grow_s=first.seconds)

    def _usual_table(self, temperature: float) -> SequoiaTable:
        rates = self.rates(temperature) or power_law(USUAL_RATE)
        return sequoia_table(rates, size=USUAL_SIZES[-1], depth=USUAL_DEPTH, max_children=len(rates))
