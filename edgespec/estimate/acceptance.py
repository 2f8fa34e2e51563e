"""Acceptance by rank for estimates: from one rate, from a file of measurements, or the built-in pair's.

One rate becomes a vector by a power law, Sequoia's model of acceptance (Chen et al. 2024, section 4.2): the
chance that none of the first k children is accepted is (k + 1)^-b, with b such that the first child is
accepted at the given rate. The child of rank k then adds (k + 1)^-b - (k + 2)^-b. From the built-in pair's
first rate this makes 3 to 16 % more tokens a pass, at 16 to 768 nodes, than its measured vectors do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from edgespec.config import require
from edgespec.grow.acceptance import AcceptanceModel, default_acceptance
from edgespec.tree.settings import TreeSettings

NUM_RANKS = 32  # beyond them a child adds less than a percent at any rate of use


@dataclass(frozen=True, slots=True, kw_only=True)
class AssumedAcceptance:
    """For each rank, the chance that its child is the one accepted; and where the chances are from."""

    rates: tuple[float, ...]
    about: str  # for people


def power_law(rate: float, num_ranks: int = NUM_RANKS) -> tuple[float, ...]:
    """Return acceptance by rank whose first entry is `rate`; its sum stays below 1."""
    require(0 < rate < 1, f"`acceptance={rate:g}` is not in (0, 1).", "Give the chance that a first child is accepted.")
    exponent = -math.log2(1 - rate)
    misses = [(rank + 1) ** -exponent for rank in range(num_ranks + 1)]
    return tuple(misses[rank] - misses[rank + 1] for rank in range(num_ranks))


def acceptance_rate(setting: Path | None) -> float | None:
    """Return the number that `acceptance` was given, if it was one; ./0.8 is a file of that name."""
    try:
        return None if setting is None else float(str(setting))
    except ValueError:
        return None


def assumed_acceptance(tree: TreeSettings, temperature: float | None) -> AssumedAcceptance:
    """Return acceptance by rank, as the settings say; raises EdgespecError for a bad rate or file."""
    rate = acceptance_rate(tree.acceptance)
    if rate is not None:
        require(
            temperature is None,
            f"`temperature={temperature}` means nothing to the rate `acceptance={tree.acceptance}`.",
            "Leave it out, or give a file of measurements.",
        )
        return AssumedAcceptance(rates=power_law(rate), about=f"{rate:g} for a first child, a power law for the others")
    model = AcceptanceModel.load(tree.acceptance) if tree.acceptance else default_acceptance()
    at = temperature or 0.0
    draw = tree.children
    owner = f"of '{tree.acceptance}'" if tree.acceptance else "of the built-in pair"
    return AssumedAcceptance(
        rates=tuple(model.rank_acceptance(at, draw)), about=f"{owner} at temperature {at:g}, {draw} children"
    )
