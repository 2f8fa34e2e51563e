"""What a head is trained for: the losses' weights, the balance of CSRA, and noise on what the head reads."""

import pytest
import torch
from transformers import PreTrainedModel

from edgespec.train.feature_files import FeatureBatch
from edgespec.train.head_losses import regression_loss
from edgespec.train.head_model import own_tensors
from edgespec.train.head_objective import LossWeights, Precision, head_losses, with_noise
from edgespec.train.head_steps import head_steps, step_rows
from tests.edgespec.train.heads import make_batch, make_head, make_target, random_texts

PLAIN = Precision(is_mixed=False)


@pytest.fixture(scope="module")
def head() -> PreTrainedModel:
    return make_head(make_target(), spread=True)


@pytest.fixture(scope="module")
def batch() -> FeatureBatch:
    with torch.no_grad():
        return make_batch(make_target(), random_texts([20, 14]))


def gradients(head: PreTrainedModel, loss: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(own_tensors(head).values()), allow_unused=True, materialize_grads=True))


def test_the_loss_is_the_weighted_sum_of_its_parts(head: PreTrainedModel, batch: FeatureBatch) -> None:
    weights = LossWeights(regression=0.3, distribution=0.2, top_tokens=0.7, alignment=0.05)
    found = head_losses(head, batch, num_steps=2, weights=weights, precision=PLAIN)
    assert found.keys() == {"loss", "regression", "distribution", "top_tokens", "alignment"}
    expected = 0.3 * found["regression"] + 0.2 * found["distribution"] + 0.7 * found["top_tokens"]
    torch.testing.assert_close(found["loss"], expected + 0.05 * found["alignment"])


def test_losses_without_weight_are_not_computed(head: PreTrainedModel, batch: FeatureBatch) -> None:
    found = head_losses(head, batch, num_steps=1, weights=LossWeights(regression=1.0), precision=PLAIN)
    assert found.keys() == {"loss", "regression", "distribution"}


def test_the_balance_of_csra_is_a_number_and_makes_it_as_large_as_the_regression(
    head: PreTrainedModel, batch: FeatureBatch
) -> None:
    """Its gradient is that of CSRA with a fixed weight, not of the quotient."""
    found = head_losses(head, batch, num_steps=2, weights=LossWeights(regression=0.5, alignment=None), precision=PLAIN)
    weight = float(found["alignment_weight"])
    assert weight * found["alignment"].item() == pytest.approx(0.5 * found["regression"].item())
    fixed = head_losses(
        head, batch, num_steps=2, weights=LossWeights(regression=0.5, alignment=weight), precision=PLAIN
    )
    assert "alignment_weight" not in fixed
    torch.testing.assert_close(found["loss"], fixed["loss"])
    for gradient, right in zip(gradients(head, found["loss"]), gradients(head, fixed["loss"]), strict=True):
        torch.testing.assert_close(gradient, right)


def test_noise_is_uniform_and_its_generators(batch: FeatureBatch) -> None:
    """Of 2 x 20 x h numbers between -0.1 and 0.1: their spread is 0.1 / sqrt(3)."""
    noisy = with_noise(batch, 0.1, torch.Generator().manual_seed(1))
    noise = noisy.features - batch.features
    assert 0.099 < float(noise.abs().max()) <= 0.1 + 1e-6
    assert float(noise.std()) == pytest.approx(0.1 / 3**0.5, rel=0.05)
    assert abs(float(noise.mean())) < 0.01
    again = with_noise(batch, 0.1, torch.Generator().manual_seed(1))
    other = with_noise(batch, 0.1, torch.Generator().manual_seed(2))
    assert torch.equal(noisy.features, again.features)
    assert not torch.equal(noisy.features, other.features)
    assert torch.equal(noisy.ids, batch.ids)


def test_the_head_reads_noise_and_is_to_find_the_features_without_it(
    head: PreTrainedModel, batch: FeatureBatch
) -> None:
    noisy = with_noise(batch, 0.5, torch.Generator().manual_seed(1))
    found = head_losses(head, batch, read=noisy, num_steps=2, weights=LossWeights(regression=1.0), precision=PLAIN)
    steps = head_steps(head, noisy, num_steps=2)
    expected = [
        regression_loss(features[step_rows(batch, step)], batch.features[step_rows(batch, step)])
        for step, features in enumerate(steps, start=1)
    ]
    torch.testing.assert_close(found["regression"], torch.stack(expected).mean())
    clean = head_losses(head, batch, num_steps=2, weights=LossWeights(regression=1.0), precision=PLAIN)
    assert float((found["regression"] - clean["regression"]).detach().abs()) > 1e-4
