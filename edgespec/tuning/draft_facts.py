"""What is known of a draft before its first tree: how it is called, what a call takes, and how far its trees may go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edgespec.draft.calls import BY_LAYER, DraftCalls
from edgespec.grow.sequoia import power_law, sequoia_table
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
        rates = self.rates(temperature) or power_law(USUAL_RATE)
        table = sequoia_table(rates, size=USUAL_SIZES[-1], depth=USUAL_DEPTH, max_children=len(rates))
        return tuple(
            MeanTree(table.expected_tokens(nodes, depth), nodes, depth)
            for nodes in USUAL_SIZES
            for depth in range(1, min(nodes, USUAL_DEPTH, self.calls.deepest or USUAL_DEPTH) + 1)
        )
