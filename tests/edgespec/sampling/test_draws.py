"""Draws with fresh randomness, against sequential draws."""

import itertools

import pytest
import torch
from scipy import stats

from edgespec.sampling.draws import draw_without_replacement


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_have_the_law_of_sequential_draws_without_replacement(dtype: torch.dtype) -> None:
    """120,000 ordered triples of 5 tokens: chi-square, 59 degrees of freedom, false alarms 1 in 1,000."""
    q = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05], dtype=dtype)
    tokens, q_drawn = draw_without_replacement(q.expand(120_000, 5), 3, torch.Generator().manual_seed(3))
    assert torch.equal(q_drawn, q[tokens])
    codes = tokens[:, 0] * 25 + tokens[:, 1] * 5 + tokens[:, 2]
    observed, expected = [], []
    for a, b, c in itertools.permutations(range(5), 3):
        observed.append(int((codes == a * 25 + b * 5 + c).sum()))
        p = float(q[a] * q[b] / (1 - q[a]) * q[c] / (1 - q[a] - q[b]))
        expected.append(p * 120_000)
    assert sum(observed) == 120_000
    assert stats.chisquare(observed, expected, sum_check=False).pvalue > 1e-3


def test_a_long_tail_is_drawn_as_often_as_its_mass_says() -> None:
    """2,500,000 tokens of 2e-8 each, together 0.05: of 100 first draws 5 are expected from the tail.

    Poisson: below 2 once in 25 runs, and this seed is none of them. Noise in float32 has no steps that fine: it has 0.
    """
    tail, mass = 2_500_000, 0.05
    q = torch.cat([torch.tensor([1 - mass]), torch.full((tail,), mass / tail)])
    generator = torch.Generator().manual_seed(1)
    hits = sum(int((draw_without_replacement(q[None], 1, generator)[0] > 0).sum()) for _ in range(100))
    assert 2 <= hits <= 15


def test_tokens_of_no_probability_come_last_with_q_zero() -> None:
    q = torch.tensor([[0.0, 1.0, 0.0]])
    tokens, q_drawn = draw_without_replacement(q, 3, torch.Generator().manual_seed(0))
    assert tokens[0, 0] == 1
    assert q_drawn.tolist() == [[1.0, 0.0, 0.0]]
