"""Fit the small models of growth on records: C2T's classifier, decision models, measured acceptance.

All fits split the records by prompt, so that reports are about texts that were not fitted on. Legend: n records.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from edgespec.errors import EdgespecError
from edgespec.grow.acceptance import INPUTS, AcceptanceModel, Measured, network_features, read_inputs
from edgespec.grow.classifier import INPUTS as CLASSIFIER_INPUTS
from edgespec.grow.classifier import Classifier
from edgespec.grow.stop_model import StopKind, StopModel, input_names
from edgespec.train.candidates import CandidateRecords, candidates_in, taken_rates
from edgespec.train.networks import (
    FitReport,
    FitSettings,
    Sample,
    descend,
    fit_network,
    forward,
    held_out_mask,
    new_layers,
    report_on,
    standardised,
    to_network,
)
from edgespec.train.records import Records

HELD_OUT_SHARE = 0.2
THRESHOLD = 0.5  # of a classifier's confidence, for the measures of a report
VALIDATION_SHARE = 0.15  # of the records for fitting: says when a decision model has learned enough
CLASSIFIER = FitSettings(hidden=(48,), steps=3000, learning_rate=1e-3, weight_decay=0.0)
# A classifier of another pair does nearly as well as one's own: few records take more from it than they bring, unless
# it keeps near to what it was.
TUNING = replace(CLASSIFIER, steps=300, learning_rate=1e-4)
# Of the chance that a slot is tried. Below 1, because what selection needs is the order of slots near the budget's
# cutoff, and those are seldom tried.
WEIGHT_POWER = 0.5
STOP = FitSettings(steps=1000, learning_rate=1e-3, weight_decay=1e-2)
STOP_WIDTHS: dict[StopKind, tuple[int, ...]] = {"hidden": (32, 16), "probabilities": (32,)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifierReport:
    """C2T's own measures (appendix B.2) beside the probabilities' quality, on held-out records."""

    fit: FitReport
    recall: float  # of accepted candidates, the share at or above the threshold
    positive_rate: float  # share of all candidates at or above it


def fit_classifier(
    records: Records, settings: FitSettings | None = None, *, negatives: float = 1.0, initial: Classifier | None = None
) -> tuple[Classifier, ClassifierReport]:
    """Fit C2T's classifier on `records` of chosen children, which have a column `prompt`.

    A record is accepted with chance V, and for each that is, about `negatives` of the others stay, as
    in appendix B.2, which names no number. That makes the classifier surer than what it sees
    warrants: its confidence is for thresholds, not a chance. `fit` in the report says by how much.
    With `initial` it is fine-tuned from that classifier (appendix B.4), whose width it keeps, in fewer and smaller
    steps. Raises EdgespecError where there are no records of two prompts.
    """
    settings = settings or (CLASSIFIER if initial is None else TUNING)
    train, held_out = _split(records, HELD_OUT_SHARE, settings.seed, "chosen children")
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
    is_positive = predicted >= THRESHOLD
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
        Sample(features=train["inputs"], labels=train["acceptance"], weights=train["weight"] ** WEIGHT_POWER),
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


def fit_acceptance(
    records: CandidateRecords, *, about: Mapping[str, str] | None = None, settings: FitSettings | None = None
) -> tuple[AcceptanceModel, FitReport]:
    """Fit the two networks of measured acceptance to records with a column `prompt`.

    They are fitted together, by the cross-entropy of what the target took. The report is on the chances of held-out
    candidates; its baseline is q' itself. Raises EdgespecError where there are no records of two prompts.
    """
    settings = settings or FitSettings()
    train, held_out = _split(records, HELD_OUT_SHARE, settings.seed, "candidates")
    model = _fitted(train, measured_rates(records), dict(about or {}), settings)
    predicted = model.candidate_acceptance(candidates_in(held_out))
    is_taken = held_out["taken"][:, None] == torch.arange(predicted.shape[1])
    report = report_on(
        "candidate",
        predicted.flatten(),
        held_out["perturbed"].flatten(),
        is_taken.flatten(),
        torch.ones(is_taken.numel()),
        num_train=train["taken"].shape[0] * predicted.shape[1],
    )
    return model, report


def measured_rates(records: CandidateRecords) -> tuple[Measured, ...]:
    """Return the mean acceptance by rank of every draw and temperature."""
    found = []
    for temperature in records["temperature"].unique().tolist():
        here = _where(records, records["temperature"][:, 0] == temperature)
        at = round(temperature, 4)
        rates = {"coupled": taken_rates(here), "sampled": here["sampled_rates"], "chosen": here["chosen_rates"]}
        found += [Measured(draw=draw, temperature=at, rates=tuple(of.mean(0).tolist())) for draw, of in rates.items()]  # type: ignore[arg-type]
    return tuple(found)


def _fitted(
    records: CandidateRecords, measured: tuple[Measured, ...], about: Mapping[str, str], settings: FitSettings
) -> AcceptanceModel:
    generator = torch.Generator().manual_seed(settings.seed)
    known = read_inputs(candidates_in(records))
    inputs, means, stds, layers = [], [], [], []
    for names in INPUTS.values():
        features, mean, std = standardised(network_features(names, known))
        inputs.append(features)  # [n, c, i] of the candidates, [n, 1, i] of none
        means.append(mean)
        stds.append(std)
        layers.append(new_layers((features.shape[-1], *settings.hidden, 1), generator))
    taken, batch = records["taken"], min(settings.batch, records["taken"].shape[0])

    def loss_of_batch() -> Tensor:
        some = torch.randint(taken.shape[0], (batch,), generator=generator)
        logits = [forward(of_one, features[some], "tanh") for of_one, features in zip(layers, inputs, strict=True)]
        return nn.functional.cross_entropy(torch.cat(logits, -1), taken[some])

    for _ in descend(itertools.chain(*layers), loss_of_batch, settings):
        pass
    networks = {
        kind: to_network(INPUTS[kind], mean, std, "tanh", of_one)
        for kind, mean, std, of_one in zip(INPUTS, means, stds, layers, strict=True)
    }
    return AcceptanceModel(candidate=networks["candidate"], none=networks["none"], measured=measured, about=about)


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
