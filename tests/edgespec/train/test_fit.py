"""Fitting finds a function that is known, reports honestly, and repeats."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from edgespec.errors import EdgespecError
from edgespec.grow.acceptance import Measured
from edgespec.train.fit import FitSettings, fit_acceptance, fit_classifier, fit_stop
from edgespec.train.networks import held_out_mask, log_loss, report_on
from edgespec.train.records import Records

QUICK = FitSettings(steps=400)


def made_up_records(draw: int, seed: int, count: int = 4000) -> Records:
    """Records whose acceptance is a simple function of what a network may read."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, generator=generator)

    rank = torch.randint(4, (count,), generator=generator)
    mass_left = torch.where(rank == 0, 1.0, uniform(0.1, 0.9))
    q = mass_left * uniform(0.01, 1)
    conditional = q / mass_left
    acceptance = torch.sigmoid(1.5 * conditional.log() + 3 - rank) if draw == 0 else torch.sqrt(q)
    return {
        "acceptance": acceptance,
        "weight": uniform(0.05, 1),
        "parent_value": uniform(0.05, 1),
        "none_before": uniform(0.5, 1),
        "rank": rank,
        "depth": torch.randint(1, 9, (count,), generator=generator),
        "q": q,
        "mass_left": mass_left,
        "entropy": uniform(0, 4),
        "top_q": uniform(0.2, 1),
        "path_probability": q * uniform(0, 1),
        "temperature": torch.full((count,), 0.6),
        "draw": torch.full((count,), draw),
        "prompt": torch.arange(count) // 100,
    }


def both_draws() -> Records:
    parts = [made_up_records(0, 1), made_up_records(1, 2)]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def test_a_known_acceptance_is_found() -> None:
    measured = (Measured(draw="chosen", temperature=0.6, tokens=3.0, rates=(0.5,)),)
    records = both_draws()
    model, reports = fit_acceptance(records, measured=measured, about={"target": "none"}, settings=QUICK)
    assert [report.name for report in reports] == ["slot", "sampled", "chosen"]
    slot, sampled, chosen = reports
    for report in (sampled, chosen):
        assert report.num_held_out == 800
        assert report.num_train == 3200
        assert report.log_loss - report.least_log_loss < 0.005
        assert report.baseline_log_loss > report.log_loss + 0.01
        assert report.calibration_error < 0.03
        assert sum(bucket.weight for bucket in report.reliability) == pytest.approx(1)
    # A slot's acceptance is what its token's is on average: rank and nothing else tells here.
    assert slot.log_loss == pytest.approx(slot.baseline_log_loss, abs=0.01)
    q = torch.tensor([[0.5, 0.1]], dtype=torch.float64)
    predicted = model.token_acceptance(
        draw="chosen",
        q=q,
        mass_left=torch.tensor([[1.0, 0.5]]).double(),
        entropy=torch.tensor([2.0]).double(),
        top_q=torch.tensor([0.5]).double(),
        depth=3,
        temperature=0.6,
    )
    torch.testing.assert_close(predicted, q.sqrt(), atol=0.05, rtol=0)
    assert model.measured == measured


def test_the_same_seed_fits_the_same() -> None:
    records = both_draws()
    settings = FitSettings(steps=20)
    first, again = (fit_acceptance(records, settings=settings)[0] for _ in range(2))
    assert torch.equal(first.sampled.weights[0], again.sampled.weights[0])
    other = fit_acceptance(records, settings=FitSettings(steps=20, seed=1))[0]
    assert not torch.equal(first.sampled.weights[0], other.sampled.weights[0])


def test_a_missing_draw_is_named() -> None:
    with pytest.raises(EdgespecError, match="draw top_k") as caught:
        fit_acceptance(made_up_records(0, 1), settings=QUICK)
    assert caught.value.code == "E_RECORDS"


def test_prompts_are_held_out_whole() -> None:
    prompts = torch.arange(1000) // 50
    held_out = held_out_mask(prompts, 0.2, seed=0)
    assert set(prompts[held_out].tolist()).isdisjoint(prompts[~held_out].tolist())
    assert prompts[held_out].unique().numel() == 4
    assert held_out_mask(torch.tensor([0, 1]), 0.01, seed=0).sum() == 1


def test_the_classifier_learns_who_is_accepted() -> None:
    records = made_up_records(1, 3)
    records["parent_value"] = torch.ones_like(records["q"])
    records["acceptance"] = (records["path_probability"] > 0.3).float()
    classifier, report = fit_classifier(records, steps=800, learning_rate=5e-3)
    assert report.recall > 0.95
    rare = float(records["acceptance"].mean())
    assert report.positive_rate == pytest.approx(rare, abs=0.05)
    assert report.fit.num_train < 3200  # negatives were sampled
    confidence = classifier.confidence(
        path_probability=torch.tensor([[0.8, 0.1]]), entropy=torch.tensor([2.0]), depth=2
    )
    assert confidence[0, 0] > 0.9
    assert confidence[0, 1] < 0.1


@pytest.mark.parametrize("kind", ["hidden", "probabilities"])
def test_decision_models_learn_which_nodes_go_on(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(3000, 6, generator=generator)
    records = {
        "acceptance": torch.sigmoid(2 * inputs[:, 0] - inputs[:, 3]),
        "weight": torch.ones(3000),
        "prompt": torch.arange(3000) // 60,
    }
    model, report = fit_stop(kind, inputs, records, steps=400, learning_rate=5e-3, weight_decay=0.0)  # type: ignore[arg-type]
    assert model.kind == kind
    assert len(model.network.weights) == (3 if kind == "hidden" else 2)
    assert report.log_loss - report.least_log_loss < 0.01
    assert report.baseline_log_loss > report.log_loss + 0.1


def test_a_report_is_its_definition() -> None:
    labels, weights = torch.tensor([1.0, 0.0, 0.5, 0.25]), torch.tensor([1.0, 1.0, 2.0, 0.0])
    predicted = torch.tensor([0.85, 0.15, 0.55, 1.0])
    report = report_on("it", predicted, torch.full((4,), 0.5), labels, weights, num_train=7)
    assert report.baseline_log_loss == pytest.approx(torch.tensor(2.0).log().item())
    assert report.calibration_error == pytest.approx((0.15 + 0.15 + 2 * 0.05) / 4)
    assert [round(bucket.predicted, 2) for bucket in report.reliability] == [0.15, 0.55, 0.85]
    assert log_loss(labels, labels, weights) == pytest.approx(2 * 0.6931 / 4, abs=1e-3)
    assert report.least_log_loss == pytest.approx(log_loss(labels, labels, weights))
