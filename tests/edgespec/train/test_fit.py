"""Fitting finds a function that is known, reports honestly, and repeats."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from edgespec.errors import EdgespecError
from edgespec.train.fit import CLASSIFIER, TUNING, fit_classifier, fit_stop
from edgespec.train.networks import FitSettings, held_out_mask, log_loss, report_on
from edgespec.train.records import Records


def chosen_records(seed: int, count: int = 4000) -> Records:
    """Records of chosen children of all kinds, some of which are accepted."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, generator=generator)

    path_probability = uniform(0.001, 1) * uniform(0, 1)
    return {
        "acceptance": (path_probability > 0.3).float(),
        "parent_value": torch.ones(count),
        "depth": torch.randint(1, 9, (count,), generator=generator),
        "entropy": uniform(0, 4),
        "path_probability": path_probability,
        "prompt": torch.arange(count) // 100,
    }


def test_prompts_are_held_out_whole() -> None:
    prompts = torch.arange(1000) // 50
    held_out = held_out_mask(prompts, 0.2, seed=0)
    assert set(prompts[held_out].tolist()).isdisjoint(prompts[~held_out].tolist())
    assert prompts[held_out].unique().numel() == 4
    assert held_out_mask(torch.tensor([0, 1]), 0.01, seed=0).sum() == 1


def test_the_classifier_learns_who_is_accepted() -> None:
    records = chosen_records(3)
    classifier, report = fit_classifier(records, replace(CLASSIFIER, steps=800, learning_rate=5e-3))
    assert report.recall > 0.95
    rare = float(records["acceptance"].mean())
    assert report.positive_rate == pytest.approx(rare, abs=0.05)
    assert report.fit.num_train < 3200  # negatives were sampled
    confidence = classifier.confidence(
        path_probability=torch.tensor([[0.8, 0.1]]), entropy=torch.tensor([2.0]), depth=2
    )
    assert confidence[0, 0] > 0.9
    assert confidence[0, 1] < 0.1


def test_fine_tuning_goes_on_from_another_classifier() -> None:
    first, _ = fit_classifier(chosen_records(3), replace(CLASSIFIER, steps=300, learning_rate=5e-3))
    # Of another pair: other inputs, and its tokens are accepted from a smaller probability on.
    others = chosen_records(4, count=400)
    others = {**others, "acceptance": (others["path_probability"] > 0.15).float(), "entropy": others["entropy"] + 3}
    same, _ = fit_classifier(others, replace(TUNING, steps=1, learning_rate=0.0), initial=first)
    quick = replace(CLASSIFIER, steps=100, learning_rate=5e-3)
    tuned, of_tuned = fit_classifier(others, quick, initial=first)
    _, of_new = fit_classifier(others, quick)

    asked = {"path_probability": torch.tensor([[0.6, 0.22, 0.02]]), "entropy": torch.tensor([4.0]), "depth": 2}
    torch.testing.assert_close(same.confidence(**asked), first.confidence(**asked))
    assert first.confidence(**asked)[0, 1] < 0.4 < 0.6 < tuned.confidence(**asked)[0, 1]
    assert of_tuned.fit.log_loss < of_new.fit.log_loss


@pytest.mark.parametrize("kind", ["hidden", "probabilities"])
def test_decision_models_learn_which_nodes_go_on(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(3000, 6, generator=generator)
    records = {
        "acceptance": torch.sigmoid(2 * inputs[:, 0] - inputs[:, 3]),
        "weight": torch.ones(3000),
        "prompt": torch.arange(3000) // 60,
    }
    quick = FitSettings(steps=400, learning_rate=5e-3, weight_decay=0.0)
    model, report = fit_stop(kind, inputs, records, settings=quick)
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


def test_one_prompt_is_too_few() -> None:
    records = {**chosen_records(1), "prompt": torch.zeros(4000)}
    with pytest.raises(EdgespecError, match="no records of two prompts") as caught:
        fit_classifier(records)
    assert caught.value.code == "E_RECORDS"
