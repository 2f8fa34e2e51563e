"""Fit measured acceptance: which of a node's candidates the target takes, and the table of acceptance by rank."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from edgespec.errors import EdgespecError
from edgespec.grow.acceptance import INPUTS, AcceptanceModel, Measured, network_features, read_inputs
from edgespec.train.candidates import CandidateRecords, candidates_in, taken_rates
from edgespec.train.networks import (
    FitReport,
    FitSettings,
    forward,
    held_out_mask,
    new_layers,
    report_on,
    standardised,
    to_network,
)

HELD_OUT_SHARE = 0.2


def fit_acceptance(
    records: CandidateRecords,
    *,
    about: Mapping[str, str] | None = None,
    settings: FitSettings | None = None,
    held_out_share: float = HELD_OUT_SHARE,
) -> tuple[AcceptanceModel, FitReport]:
    """Fit the two networks to records with a column `prompt`, and report on the chances of held-out candidates.

    They are fitted together, by the cross-entropy of what the target took. The baseline is q' itself. Raises
    EdgespecError where there are no records of two prompts.
    """
    settings = settings or FitSettings()
    if int(records["prompt"].unique().numel()) < 2:
        raise EdgespecError("E_RECORDS", "there are no records of two prompts.", "Collect records on more prompts.")
    held_out = held_out_mask(records["prompt"], held_out_share, seed=settings.seed)
    train = {name: column[~held_out] for name, column in records.items()}
    model = _fitted(train, measured_rates(records), dict(about or {}), settings)
    rest = {name: column[held_out] for name, column in records.items()}
    predicted = model.candidate_acceptance(candidates_in(rest))
    is_taken = rest["taken"][:, None] == torch.arange(predicted.shape[1])
    report = report_on(
        "candidate",
        predicted.flatten(),
        rest["perturbed"].flatten(),
        is_taken.flatten(),
        torch.ones(is_taken.numel()),
        num_train=int((~held_out).sum()) * predicted.shape[1],
    )
    return model, report


def measured_rates(records: CandidateRecords) -> tuple[Measured, ...]:
    """Return the mean acceptance by rank of every draw and temperature."""
    found = []
    for temperature in records["temperature"].unique().tolist():
        here = {name: column[records["temperature"][:, 0] == temperature] for name, column in records.items()}
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
    parameters = [parameter for of_one in layers for layer in of_one for parameter in layer.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=settings.learning_rate, weight_decay=settings.weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.steps)
    taken, batch = records["taken"], min(settings.batch, records["taken"].shape[0])
    for _ in range(settings.steps):
        some = torch.randint(taken.shape[0], (batch,), generator=generator)
        logits = [forward(of_one, features[some], "tanh") for of_one, features in zip(layers, inputs, strict=True)]
        loss = nn.functional.cross_entropy(torch.cat(logits, -1), taken[some])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    networks = {
        kind: to_network(INPUTS[kind], mean, std, "tanh", of_one)
        for kind, mean, std, of_one in zip(INPUTS, means, stds, layers, strict=True)
    }
    return AcceptanceModel(candidate=networks["candidate"], none=networks["none"], measured=measured, about=about)
