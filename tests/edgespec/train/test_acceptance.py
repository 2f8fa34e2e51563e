"""Fitting measured acceptance: chances that are known are found, reported honestly, and found again."""

import pytest
import torch
from torch import Tensor

from edgespec.errors import EdgespecError
from edgespec.grow.acceptance import NUM_CANDIDATES, candidates_of
from edgespec.grow.children import best_children
from edgespec.train.candidates import NUM_RANKS, CandidateRecords, candidates_in
from edgespec.train.fit import fit_acceptance, measured_rates
from edgespec.train.networks import FitSettings

QUICK = FitSettings(steps=600, batch=256)
VOCAB = 50


def known_chances(records: CandidateRecords) -> Tensor:
    """Chances [n, c + 1] that only some of what is known decides on: the last one is that of none."""
    margin = records["perturbed"].log() - records["perturbed"][:, :1].log()
    logits = 0.8 * margin - 0.5 * torch.log1p(records["rank"])
    none = -1.5 - records["concentration"].log()
    return torch.cat([logits, none], 1).softmax(-1)


def made_up_records(seed: int, count: int = 4000) -> CandidateRecords:
    generator = torch.Generator().manual_seed(seed)
    q = (2 * torch.randn(count, VOCAB, generator=generator)).softmax(-1)
    noise = 1 / torch.empty(count, VOCAB).exponential_(generator=generator)
    tokens, perturbed = best_children(q, NUM_CANDIDATES, noise)
    depth = torch.randint(1, 9, (count, 1), generator=generator)
    columns = candidates_of(q, tokens, perturbed, noise.gather(1, tokens), depth=depth, temperature=0.6)
    records = {name: column.expand(count, -1) for name, column in columns.items()}
    taken = torch.multinomial(known_chances(records), 1, generator=generator)[:, 0]
    rates = torch.rand(count, NUM_RANKS, generator=generator)
    return {
        **records, "taken": taken, "sampled_rates": rates, "chosen_rates": rates / 2,
        "prompt": torch.arange(count) // 100,
    }  # fmt: skip


def test_known_chances_are_found() -> None:
    model, report = fit_acceptance(made_up_records(1), about={"target": "none"}, settings=QUICK)
    others = made_up_records(2)
    known = known_chances(others)[:, :-1]

    def error(predicted: Tensor) -> float:
        return float((predicted - known).abs().sum(1).mean())

    found = error(model.candidate_acceptance(candidates_in(others)))
    assert found < error(known.mean(0).expand_as(known)) / 2 < error(others["perturbed"]) / 2
    assert found < 0.12
    assert (report.name, report.num_train, report.num_held_out) == ("candidate", 3200 * 32, 800 * 32)
    assert report.baseline_log_loss > report.log_loss + 0.005
    assert report.calibration_error < 0.01
    assert sum(bucket.weight for bucket in report.reliability) == pytest.approx(1)
    assert model.about == {"target": "none"}


def test_the_same_seed_fits_the_same() -> None:
    records = made_up_records(1, 400)
    settings = FitSettings(steps=20)
    first, again = (fit_acceptance(records, settings=settings)[0] for _ in range(2))
    other = fit_acceptance(records, settings=FitSettings(steps=20, seed=1))[0]
    for kind in ("candidate", "none"):
        weights = [getattr(found, kind).weights[0] for found in (first, again, other)]
        assert torch.equal(weights[0], weights[1])
        assert not torch.equal(weights[0], weights[2])


def test_rates_by_rank_are_the_means_of_each_draw_and_temperature() -> None:
    records = made_up_records(3, 600)
    records["temperature"] = torch.where(torch.arange(600)[:, None] < 200, 0.0, 0.6)
    measured = measured_rates(records)
    assert {(found.draw, found.temperature) for found in measured} == {
        (draw, at) for draw in ("coupled", "sampled", "chosen") for at in (0.0, 0.6)
    }
    for found in measured:
        here = records["temperature"][:, 0] == torch.tensor(found.temperature)
        for rank, rate in enumerate(found.rates):
            values = {
                "coupled": (records["taken"][here] == rank).float(),
                "sampled": records["sampled_rates"][here, rank],
                "chosen": records["chosen_rates"][here, rank],
            }
            assert rate == pytest.approx(float(values[found.draw].mean()), abs=1e-6)
    assert fit_acceptance(records, settings=FitSettings(steps=1))[0].measured == measured


def test_one_prompt_is_too_few() -> None:
    records = {**made_up_records(1, 100), "prompt": torch.zeros(100)}
    with pytest.raises(EdgespecError, match="no records of two prompts") as caught:
        fit_acceptance(records, settings=QUICK)
    assert caught.value.code == "E_RECORDS"
