"""Losses of heads against slow literal versions, values and gradients."""

import math

import pytest
import torch
from torch import Tensor

from edgespec.model.row_chunks import rows_at_once
from edgespec.train import head_losses
from edgespec.train.head_losses import alignment_losses, distribution_losses, regression_loss

ROWS, HIDDEN = 11, 6


def made(num_steps: int) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """Features of steps, the target's, and the rows of two blocks of 6 and 5 that mean something."""
    generator = torch.Generator().manual_seed(num_steps)
    features = [torch.randn(ROWS, HIDDEN, generator=generator, requires_grad=True) for _ in range(num_steps)]
    place = torch.tensor([0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4])
    is_padding = torch.tensor([False] * 9 + [True] * 2)
    rows = [(place >= step) & ~is_padding for step in range(num_steps)]
    return features, torch.randn(ROWS, HIDDEN, generator=generator), rows


def literal_alignment(features: list[Tensor], target: Tensor, rows: list[Tensor], step: int) -> Tensor:
    """CORAL's equation 2 in loops: step counts from 1."""

    def similarity(first: Tensor, second: Tensor) -> Tensor:
        return (first @ second) / (first.norm() * second.norm()) / 0.07

    everything = [("target", row, target[row]) for row in range(ROWS) if rows[0][row]]
    for earlier in range(step):
        everything += [(earlier, row, features[earlier][row]) for row in range(ROWS) if rows[earlier][row]]
    losses = []
    for row in range(ROWS):
        if not rows[step - 1][row]:
            continue
        query = features[step - 1][row]
        sums = sum(similarity(query, other).exp() for name, at, other in everything if (name, at) != (step - 1, row))
        positives = [other for name, at, other in everything if at == row and name != step - 1]
        assert len(positives) == step
        losses += [-(similarity(query, positive).exp() / sums).log() / step for positive in positives]
    return torch.stack(losses).sum() / rows[step - 1].sum()


@pytest.mark.parametrize("chunk_bytes", [1, 4 * 50 * 3, 1 << 20])
@pytest.mark.parametrize("num_steps", [1, 3])
def test_csra_is_the_papers_value_and_gradient(num_steps: int, chunk_bytes: int) -> None:
    features, target, rows = made(num_steps)
    features, target = [step.detach().double().requires_grad_() for step in features], target.double()
    expected = [literal_alignment(features, target, rows, step) for step in range(1, num_steps + 1)]
    expected_gradients = torch.autograd.grad(torch.stack(expected).mean(), features)
    found = alignment_losses(features, target, rows, chunk_bytes=chunk_bytes)
    gradients = torch.autograd.grad(torch.stack(found).mean(), features)
    torch.testing.assert_close(torch.stack(found).double(), torch.stack(expected), rtol=1e-4, atol=1e-5)
    for gradient, right in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, right, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("chunk_rows", [3, 100])
def test_distributions_are_compared_row_by_row(chunk_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    features, target, rows = made(3)
    head = torch.randn(HIDDEN, 9, generator=torch.Generator().manual_seed(9))
    monkeypatch.setattr("edgespec.model.row_chunks.CHUNK_BYTES", chunk_rows * 9 * 4)
    assert rows_at_once(9) == chunk_rows
    for num_top in (0, 3):
        losses = distribution_losses(
            features, target, rows, logits_of=lambda some: some @ head, vocab=9, num_top=num_top
        )
        for found, num_tokens in ((losses.distribution, 9), (losses.top_tokens, num_top)):
            expected = literal_entropies(features, target, rows, head, num_tokens)
            torch.testing.assert_close(torch.stack(found), torch.stack(expected))
            for gradient, right in zip(
                torch.autograd.grad(sum(found), features, retain_graph=True),
                torch.autograd.grad(sum(expected), features),
                strict=True,
            ):
                torch.testing.assert_close(gradient, right)


def literal_entropies(
    features: list[Tensor], target: Tensor, rows: list[Tensor], head: Tensor, num_tokens: int
) -> list[Tensor]:
    """-sum of p(x) log q(x) over the target's `num_tokens` most probable tokens, which p and q are not limited to."""
    expected = []
    for step, which in zip(features, rows, strict=True):
        p, log_q = (target @ head).softmax(-1), (step @ head).log_softmax(-1)
        sums = []
        for row in range(ROWS):
            first = sorted(range(9), key=lambda token: -float(p[row, token]))[:num_tokens]
            sums.append(-sum((p[row, token] * log_q[row, token] for token in first), start=0 * log_q[row, 0]))
        expected.append(
            torch.stack([value for value, is_counted in zip(sums, which, strict=True) if is_counted]).mean()
        )
    return expected


def test_the_top_tokens_are_as_many_as_in_hass() -> None:
    assert head_losses.TOP_TOKENS == 10


def test_smooth_l1_is_quadratic_below_one() -> None:
    difference = torch.tensor([[0.5, -0.5], [3.0, 0.0]])
    assert float(regression_loss(difference, torch.zeros(2, 2))) == pytest.approx((0.125 + 0.125 + 2.5 + 0) / 4)


def test_the_temperature_is_the_papers() -> None:
    """Two orthogonal rows, perfectly predicted: exp(1/t) against two others at exp(0)."""
    unit = torch.eye(2)
    (found,) = alignment_losses([unit], unit, [torch.ones(2, dtype=torch.bool)])
    assert float(found) == pytest.approx(math.log1p(2 * math.exp(-1 / 0.07)), abs=1e-5)
    assert head_losses.TEMPERATURE == 0.07
