"""Fit the models that end or prune growth on records: C2T's classifier, decision models.

All fits split the records by prompt, so that reports are about texts that were not fitted on. Legend: n records.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from edgespec.errors import EdgespecError
from edgespec.grow.classifier import INPUTS as CLASSIFIER_INPUTS
from edgespec.grow.classifier import Classifier
from edgespec.grow.stop_model import StopKind, StopModel, input_names
from edgespec.train.networks import FitReport, FitSettings, Sample, fit_network, held_out_mask, report_on
from edgespec.train.records import Records

HELD_OUT_SHARE = 0.2
VALIDATION_SHARE = 0.15  # of what is fitted on: says when a decision model has learned enough
CLASSIFIER = FitSettings(hidden=(48,), steps=3000, learning_rate=1e-3, weight_decay=0.0)
# A classifier of another pair does nearly as well as one's own: few records take more from it than they bring, unless
# it keeps near to what it was.
TUNING = replace(CLASSIFIER, steps=300, learning_rate=1e-4)
STOP = FitSettings(steps=1000, learning_rate=1e-3, weight_decay=1e-2)
STOP_WIDTHS: dict[StopKind, tuple[int, ...]] = {"hidden": (32, 16), "probabilities": (32,)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifierReport:
    """C2T's own measures (appendix B.2) beside the probabilities' quality, on held-out records."""

    fit: FitReport
    recall: float  # of what is accepted, the share at or above the threshold
    positive_rate: float  # share of all candidates at or above it


def fit_classifier(
    records: Records,
    settings: FitSettings | None = None,
    *,
    threshold: float = 0.5,
    negatives: float = 1.0,
    held_out_share: float = HELD_OUT_SHARE,
    initial: Classifier | None = None,
) -> tuple[Classifier, ClassifierReport]:
    """Fit C2T's classifier on `records` of chosen children, which have a column `prompt`.

    A record is accepted with chance V, and for each that is, about `negatives` of the others stay, as
    in appendix B.2, which names no number. That makes the classifier surer than what it sees
    warrants: its confidence is for thresholds, not a chance. `fit` in the report says by how much.
    With `initial` it is fine-tuned from that classifier (appendix B.4), whose width it keeps, in fewer and smaller
    steps. Raises EdgespecError where there are no records of two prompts.
    """
    settings = settings or (CLASSIFIER if initial is None else TUNING)
    train, held_out = _split(records, held_out_share, settings.seed, "chosen children")
    generator = torch.Generator().manual_seed(settings.seed)
    value = _value(train)
    is_accepted = torch.rand(value.shape, generator=generator) < value
    rate = negatives * float(is_accepted.sum()) / max(1, int((~is_accepted).sum()))
    is_kept = is_accepted | (torch.rand(value.shape, generator=generator) < rate)
    network = fit_network(
        CLASSIFIER_INPUTS,
        Sample(
            features=_classifier_features(train)[is_kept],
            labels=is_accepted[is_kept],
            weights=torch.ones(int(is_kept.sum())),
        ),
        settings=settings,
        initial=None if initial is None else initial.network,
    )
    predicted, observed = network(_classifier_features(held_out)), _value(held_out).double()
    is_positive = predicted >= threshold
    fit = report_on(
        "classifier",
        predicted,
        held_out["path_probability"],
        observed,
        torch.ones_like(observed),
        num_train=int(is_kept.sum()),
    )
    recall = float((observed * is_positive).sum() / observed.sum().clamp(min=1e-12))
    return Classifier(network=network), ClassifierReport(
        fit=fit, recall=recall, positive_rate=float(is_positive.double().mean())
    )


def fit_stop(
    kind: StopKind,
    inputs: Tensor,
    records: Records,
    *,
    settings: FitSettings | None = None,
    held_out_share: float = HELD_OUT_SHARE,
) -> tuple[StopModel, FitReport]:
    """Fit a decision model on `inputs` [n, i]: hidden states, or `distribution_inputs`.

    `records` are those of `stop_records`, with a column `prompt`. Three layers for hidden states, two
    for probabilities (Improving-MCSD, section 3.3), whatever widths `settings` have. The
    baseline is the mean acceptance. Raises EdgespecError where there are no records of three prompts.
    """
    settings = replace(settings or STOP, hidden=STOP_WIDTHS[kind])
    rest, held_out = _split({**records, "inputs": inputs}, held_out_share, settings.seed, "nodes")
    train, validation = _split(rest, VALIDATION_SHARE, settings.seed, "nodes besides the held-out ones")
    network = fit_network(
        input_names(kind, inputs.shape[1]),
        Sample(features=train["inputs"], labels=train["acceptance"], weights=fit_weights(train["weight"], 0.5)),
        settings=settings,
        validation=Sample(features=validation["inputs"], labels=validation["acceptance"], weights=validation["weight"]),
    )
    mean = (train["acceptance"] * train["weight"]).sum() / train["weight"].sum()
    report = report_on(
        f"stop_{kind}",
        network(held_out["inputs"].float()),
        mean.expand(held_out["acceptance"].shape),
        held_out["acceptance"],
        held_out["weight"],
        num_train=train["acceptance"].shape[0],
    )
    return StopModel(kind=kind, network=network), report


def fit_weights(weight: Tensor, power: float) -> Tensor:
    """Return how much each record counts in a fit, for slots that are tried with chance `weight` [n].

    A power below 1, because what selection needs is the order of slots near the budget's cutoff, and
    those are seldom tried.
    """
    return weight**power


def _value(records: Records) -> Tensor:
    """Return V of the chosen children: [n]."""
    return (records["parent_value"] * records["acceptance"]).float()


def _classifier_features(records: Records) -> Tensor:
    return torch.stack([records[name].float() for name in CLASSIFIER_INPUTS], -1)


def _where(records: Records, mask: Tensor) -> Records:
    return {name: column[mask] for name, column in records.items()}


def _split(records: Records, share: float, seed: int, what: str) -> tuple[Records, Records]:
    """Split the records: those to fit on, and those of held-out prompts."""
    if int(records["prompt"].unique().numel()) < 2:
        raise EdgespecError(
            "E_RECORDS", f"there are no records of two prompts for {what}.", "Collect records on more prompts."
        )
    held_out = held_out_mask(records["prompt"], share, seed=seed)
    return _where(records, ~held_out), _where(records, held_out)
