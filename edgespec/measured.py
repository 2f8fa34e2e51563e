"""What a profile measured, as the rooms that use it take it: acceptance, curves of passes, shares of a pass."""

from __future__ import annotations

import functools
import json
from pathlib import Path

from edgespec.grow.acceptance import AcceptanceModel
from edgespec.placement.parallel import PassShares
from profiles.cost import Curve
from profiles.schema import Profile, TemperaturePlan


def acceptance_of(profile: Profile) -> AcceptanceModel:
    """Return the pair's acceptance model."""
    return _acceptance(profile.name, json.dumps(profile.acceptance))


def verify_curve(profile: Profile) -> Curve:
    """Return the curve of the seconds of a pass over the nodes below the root."""
    return Curve(
        tuple(float(timing.count) for timing in profile.verify), tuple(timing.median_s for timing in profile.verify)
    )


def pass_points(profile: Profile) -> dict[int, list[tuple[float, float]]]:
    """Return the rows of passes and their seconds, by the texts that share them."""
    curve = verify_curve(profile)
    alone = [(1 + count, float(curve(count))) for count in curve.counts]
    together = {
        found.num_texts: [(float(found.num_texts + timing.count), timing.median_s) for timing in found.steps]
        for found in profile.together
    }
    return {1: alone, **together}


def pass_shares(profile: Profile, plan: TemperaturePlan) -> PassShares:
    """Return what a pass's parts take, as they were measured, next to one that streams all layers."""
    most = max((plan.best, *plan.by_texts), key=lambda found: found.num_texts)
    if most.num_texts == 1:
        return PassShares()
    resident = profile.pair.resident_layers / profile.pair.num_layers
    all_streamed_s = profile.plain_step_s / ((1 - resident) + PassShares().resident * resident)
    text_s = max(0.0, most.step_s - plan.best.step_s) / (most.num_texts - 1)
    return PassShares(text=text_s / all_streamed_s, tokens_left=most.tokens / plan.best.tokens, at_texts=most.num_texts)


@functools.lru_cache(maxsize=4)
def _acceptance(name: str, document: str) -> AcceptanceModel:
    return AcceptanceModel.from_document(json.loads(document), Path(f"{name}.toml"))
