"""The pair's acceptance model: fitted on its records, or the given one moved to them; and how far it holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from scipy.optimize import brentq

from edgespec.errors import EdgespecError
from edgespec.grow.acceptance import NUM_CANDIDATES, AcceptanceModel
from edgespec.train.acceptance import fit_acceptance, measured_rates
from edgespec.train.candidates import CandidateRecords, candidates_in
from edgespec.train.networks import FitSettings, report_on
from edgespec.tune.samples import Samples
from profiles.schema import Bucket, Reliability

MAX_SHIFT = 2.0  # of a log odds: a pair further away needs a model of its own
PRIOR_PLACES = 16  # in texts, that the given model is worth
FIT_STEPS = 1200
MIN_RATE = 1e-6  # of a rank that was never seen accepted: without any there is no best tree


def joined(samples: Mapping[float, Samples]) -> CandidateRecords:
    """Return the records of all temperatures as one."""
    parts = [records for found in samples.values() for records in found.records]
    return {name: torch.cat([part[name].cpu() for part in parts]) for name in parts[0]}


def fitted(records: CandidateRecords, *, seed: int) -> AcceptanceModel | None:
    """Fit a model on the pair's own records; None where there are too few to hold some out."""
    try:
        return fit_acceptance(records, settings=FitSettings(steps=FIT_STEPS, seed=seed))[0]
    except EdgespecError:
        return None


def shifted_to(model: AcceptanceModel, records: CandidateRecords, *, num_places: int | None = None) -> AcceptanceModel:
    """Return the model with its log odds moved by one number, so that the mean acceptance of all candidates is right.

    They move by less where the records are of few `num_places` in texts: later steps correct the model as they go.
    """
    share = 1.0 if num_places is None else num_places / (num_places + PRIOR_PLACES)
    return model.shifted(share * _shift(model, records))


def with_measured(model: AcceptanceModel, records: CandidateRecords) -> AcceptanceModel:
    """Return the model with the acceptance by rank of these records, in place of what it knew."""
    measured = tuple(
        replace(found, rates=tuple(max(MIN_RATE, rate) for rate in found.rates)) for found in measured_rates(records)
    )
    return replace(model, measured=measured)


def reliability(model: AcceptanceModel, records: CandidateRecords) -> Reliability:
    """Compare predicted acceptance with what was taken, in ten buckets."""
    predicted = model.candidate_acceptance(candidates_in(records)).flatten()
    is_taken = (records["taken"][:, None] == torch.arange(NUM_CANDIDATES)).flatten()
    report = report_on("candidate", predicted, predicted, is_taken, torch.ones(len(predicted)), num_train=0)
    return Reliability(
        calibration_error=report.calibration_error,
        buckets=tuple(
            # Shares that were added up may come out above 1 by a rounding.
            Bucket(predicted=bucket.predicted, observed=bucket.observed, weight=min(1.0, bucket.weight))
            for bucket in report.reliability
        ),
    )


def _shift(model: AcceptanceModel, records: CandidateRecords) -> float:
    """Return what must be added to the log odds for the means to agree, within bounds."""
    chances = model.candidate_acceptance(candidates_in(records)).double().sum(-1).clamp(1e-6, 1 - 1e-6)
    odds = chances.logit()
    wanted = float((records["taken"] < NUM_CANDIDATES).double().sum())

    def surplus(shift: float) -> float:
        return float((odds + shift).sigmoid().sum()) - wanted

    if surplus(-MAX_SHIFT) >= 0 or surplus(MAX_SHIFT) <= 0:
        return math.copysign(MAX_SHIFT, -surplus(0.0))
    return float(brentq(surplus, -MAX_SHIFT, MAX_SHIFT, xtol=1e-4))
