"""The pair's acceptance model: fitted on its records, or the given one moved to them; and how far it holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from scipy.optimize import brentq
from torch import Tensor

from edgespec.errors import EdgespecError
from edgespec.grow.acceptance import KINDS, AcceptanceModel, Kind, Measured, network_features
from edgespec.train.fit import FitSettings, fit_acceptance
from edgespec.train.networks import SMALLEST, report_on
from edgespec.train.records import DRAWS, Records, rank_acceptance
from edgespec.tune.samples import Samples
from profiles.schema import Bucket, Reliability

MAX_SHIFT = 2.0  # of a log odds: a pair further away needs a model of its own
PRIOR_PLACES = 16  # in texts, that the given model is worth
MAX_RANKS = 16
LEAST_RATE = 1e-6  # of a rank that was never seen accepted: without any there is no best tree
FIT_STEPS = 1200


def joined(samples: Mapping[float, Samples]) -> Records:
    """Return the records of all temperatures as one."""
    parts = [records for found in samples.values() for records in found.records]
    return {name: torch.cat([part[name].cpu() for part in parts]) for name in parts[0]}


def fitted(records: Records, *, seed: int) -> AcceptanceModel | None:
    """Fit a model on the pair's own records; None where there are too few to hold some out."""
    try:
        return fit_acceptance(records, settings=FitSettings(steps=FIT_STEPS, seed=seed))[0]
    except EdgespecError:
        return None


def shifted_to(model: AcceptanceModel, records: Records, *, num_places: int | None = None) -> AcceptanceModel:
    """Return the model with each network's log odds moved by one number, so that the mean acceptance is right.

    They move by less where the records are of few `num_places` in texts: the nodes of a tree share its luck, and
    later steps correct the model as they go.
    """
    share = 1.0 if num_places is None else num_places / (num_places + PRIOR_PLACES)
    changed = {}
    for kind in KINDS:
        some = _of_kind(records, kind)
        network = getattr(model, kind)
        if some["rank"].numel() > 0:
            predicted = network(network_features(network.inputs, some))
            network = network.shifted(share * _shift(predicted, some["acceptance"], some["weight"]))
        changed[kind] = network
    return replace(model, **changed)


def with_measured(model: AcceptanceModel, samples: Mapping[float, Samples]) -> AcceptanceModel:
    """Return the model with these samples' tokens a pass and acceptance by rank, by draw and temperature.

    Where the samples have none of a draw, because it fell behind, the model keeps what it knew.
    """
    measured = {(old.draw, old.temperature): old for old in model.measured if old.temperature in samples}
    for temperature, found in samples.items():
        records = joined({temperature: found})
        for draw in DRAWS:
            trees = found.trees.get(("adaptive", "chosen" if draw == "top_k" else "sampled"))
            here = records["draw"] == DRAWS.index(draw)
            if trees and bool(here.any()):
                rates = rank_acceptance({name: column[here] for name, column in records.items()})[:MAX_RANKS]
                measured[draw, temperature] = Measured(
                    draw=draw,
                    temperature=temperature,
                    tokens=sum(tree.tokens for tree in trees) / len(trees),
                    rates=tuple(max(LEAST_RATE, rate) for rate in rates),
                )
    return replace(model, measured=tuple(measured.values()))


def reliability(model: AcceptanceModel, records: Records) -> tuple[Reliability, ...]:
    """Compare predicted with exact acceptance in ten buckets, for each kind of network."""
    found = []
    for kind in KINDS:
        some = _of_kind(records, kind)
        if some["rank"].numel() == 0:
            continue
        network = getattr(model, kind)
        predicted = network(network_features(network.inputs, some))
        report = report_on(kind, predicted, predicted, some["acceptance"], some["weight"], num_train=0)
        found.append(
            Reliability(
                kind=kind,
                calibration_error=report.calibration_error,
                buckets=tuple(
                    # Shares that were added up may come out above 1 by a rounding.
                    Bucket(predicted=bucket.predicted, observed=bucket.observed, weight=min(1.0, bucket.weight))
                    for bucket in report.reliability
                ),
            )
        )
    return tuple(found)


def _of_kind(records: Records, kind: Kind) -> Records:
    """Return the records that a network of this kind is about, in float64."""
    here = (records["draw"] == DRAWS.index("top_k" if kind == "chosen" else "without_replacement")) & (
        records["weight"] > 0
    )
    return {name: column[here].double() for name, column in records.items()}


def _shift(predicted: Tensor, observed: Tensor, weight: Tensor) -> float:
    """Return what must be added to the log odds for the weighted means to agree, within bounds."""
    predicted = predicted.clamp(SMALLEST, 1 - SMALLEST)
    odds = predicted.log() - (-predicted).log1p()
    wanted = float((observed * weight).sum())

    def surplus(shift: float) -> float:
        return float(((odds + shift).sigmoid() * weight).sum()) - wanted

    if surplus(-MAX_SHIFT) >= 0 or surplus(MAX_SHIFT) <= 0:
        return math.copysign(MAX_SHIFT, -surplus(0.0))
    return float(brentq(surplus, -MAX_SHIFT, MAX_SHIFT, xtol=1e-4))
