"""Distributions: transformers' own filters as reference, and draws against sequential draws."""

import itertools

import pytest
import torch
from scipy import stats
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from edgespec.config import SamplingSettings
from edgespec.sampling.distribution import to_probs
from edgespec.sampling.draws import draw_without_replacement


@pytest.mark.parametrize(
    "settings",
    [
        SamplingSettings(temperature=0.7),
        SamplingSettings(temperature=1.3, top_k=5),
        SamplingSettings(temperature=1.0, top_p=0.9),
        SamplingSettings(temperature=1.0, min_p=0.2),
        SamplingSettings(temperature=0.8, top_k=20, top_p=0.7, min_p=0.05),
    ],
)
def test_filters_are_those_of_transformers(settings: SamplingSettings) -> None:
    logits = torch.randn(40, 50, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 3
    warpers = LogitsProcessorList([TemperatureLogitsWarper(settings.temperature)])
    if settings.top_k:
        warpers.append(TopKLogitsWarper(settings.top_k))
    if settings.top_p < 1:
        warpers.append(TopPLogitsWarper(settings.top_p))
    if settings.min_p:
        warpers.append(MinPLogitsWarper(settings.min_p))
    expected = warpers(torch.zeros(40, 1, dtype=torch.long), logits).softmax(-1)
    torch.testing.assert_close(to_probs(logits, settings), expected)


def test_temperature_zero_is_exactly_one_hot() -> None:
    logits = torch.randn(8, 30, dtype=torch.bfloat16)
    probs = to_probs(logits, SamplingSettings())
    assert torch.equal(probs.sum(-1), torch.ones(8))
    assert torch.equal(probs.argmax(-1), logits.argmax(-1))
    assert set(probs.unique().tolist()) == {0.0, 1.0}


def test_low_temperatures_do_not_overflow() -> None:
    probs = to_probs(torch.tensor([[1.0, 2.0, 3.0]]) * 1e4, SamplingSettings(temperature=1e-4))
    assert torch.isfinite(probs).all()


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
    """2,500,000 tokens of 2e-8 each, together 0.05: of 400 first draws 20 are expected from the tail.

    Poisson: below 6 or above 42 once in 10,000 runs. Noise in float32 has no steps that fine and gives one or two.
    """
    tail, mass = 2_500_000, 0.05
    q = torch.cat([torch.tensor([1 - mass]), torch.full((tail,), mass / tail)])
    generator = torch.Generator().manual_seed(1)
    hits = sum(int((draw_without_replacement(q[None], 1, generator)[0] > 0).sum()) for _ in range(400))
    assert 6 <= hits <= 42


def test_filtering_in_chunks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SamplingSettings(temperature=0.8, top_k=20, top_p=0.7, min_p=0.05)
    logits = torch.randn(37, 50, generator=torch.Generator().manual_seed(2)) * 3
    whole = to_probs(logits, settings)
    monkeypatch.setattr("edgespec.sampling.distribution.CHUNK_ELEMENTS", 400)
    assert torch.equal(to_probs(logits, settings), whole)


def test_tokens_of_no_probability_come_last_with_q_zero() -> None:
    q = torch.tensor([[0.0, 1.0, 0.0]])
    tokens, q_drawn = draw_without_replacement(q, 3, torch.Generator().manual_seed(0))
    assert tokens[0, 0] == 1
    assert q_drawn.tolist() == [[1.0, 0.0, 0.0]]


@pytest.mark.parametrize("top_p", [0.1, 0.9, 0.999])
def test_top_p_finds_in_part_of_the_vocabulary_what_sorting_all_of_it_finds(top_p: float) -> None:
    generator = torch.Generator().manual_seed(1)
    peaked = -1.5 * torch.log(torch.rand(4, 2000, generator=generator) * 2000 + 1)
    flat = 0.1 * torch.randn(4, 2000, generator=generator)  # the likeliest 512 hold a quarter of the mass
    probs = to_probs(torch.cat([peaked, flat]), SamplingSettings(temperature=1.0, top_p=top_p))
    full = torch.softmax(torch.cat([peaked, flat]), -1)
    ordered, order = full.sort(-1, descending=True)
    kept = ordered * (ordered.cumsum(-1) - ordered < top_p)
    expected = torch.zeros_like(full).scatter_(-1, order, kept / kept.sum(-1, keepdim=True))
    assert torch.allclose(probs, expected, atol=1e-7)
    assert torch.equal(probs > 0, expected > 0)
