"""What trees yielded, by draw and temperature: the tables that an acceptance model carries.

Tokens a pass are those of adaptive trees where some were recorded, else of all: they decide between
the draws. Acceptance by rank is Sequoia's vector.
"""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.grow.acceptance import Measured
from edgespec.train.record_files import RecordsHeader
from edgespec.train.records import DRAWS, Records, rank_acceptance

MAX_RANKS = 16  # children of a node that static trees make use of


def measure(records: Records, headers: Sequence[RecordsHeader]) -> tuple[Measured, ...]:
    """Return one entry for each draw and temperature."""
    found = []
    for draw, temperature in sorted({(header.draw, header.temperature) for header in headers}):
        parts = [header for header in headers if (header.draw, header.temperature) == (draw, temperature)]
        adaptive = [header for header in parts if header.tree.startswith("adaptive")] or parts
        num_trees = sum(header.num_trees for header in adaptive)
        is_here = (records["draw"] == DRAWS.index(draw)) & ((records["temperature"] - temperature).abs() < 1e-4)
        found.append(
            Measured(
                draw=draw,
                temperature=temperature,
                tokens=sum(header.tokens * header.num_trees for header in adaptive) / num_trees,
                rates=tuple(rank_acceptance({name: column[is_here] for name, column in records.items()})[:MAX_RANKS]),
            )
        )
    return tuple(found)
