"""Distributions: transformers' own filters as reference, and how a draft's differs from them."""

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from edgespec.config import DraftSampling, SamplingSettings
from edgespec.sampling.distribution import to_draft_probs, to_probs


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


def test_filtering_in_chunks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SamplingSettings(temperature=0.8, top_k=20, top_p=0.7, min_p=0.05)
    logits = torch.randn(37, 50, generator=torch.Generator().manual_seed(2)) * 3
    whole = to_probs(logits, settings)
    monkeypatch.setattr("edgespec.sampling.distribution.CHUNK_ELEMENTS", 400)
    assert torch.equal(to_probs(logits, settings), whole)


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


@pytest.mark.parametrize("form", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "cut",
    [{"top_k": 40}, {"top_k": 2000}, {"top_p": 0.95}, {"top_k": 64, "top_p": 0.95}, {"min_p": 0.05}, {"min_p": 1e-8}],
    ids=str,
)
def test_a_host_finds_among_few_tokens_what_a_device_finds_among_all(cut: dict[str, float], form: torch.dtype) -> None:
    """Certain rows, whose second token is a millionth as likely, usual ones, flat ones, and rows with tokens of 0."""
    random = torch.Generator().manual_seed(4)
    logits = torch.randn(24, 3000, generator=random, dtype=form) * torch.linspace(0.05, 20, 24)[:, None]
    logits[4:8, 3] = 60
    logits[8:12, 100:] = -torch.inf
    settings = SamplingSettings(temperature=1.0, **cut)
    probs = logits.softmax(-1)
    if settings.top_k:
        kth_best = probs.sort(-1, descending=True).values[:, settings.top_k - 1 : settings.top_k]
        probs = probs * (probs >= kth_best) / (probs * (probs >= kth_best)).sum(-1, keepdim=True)
    if settings.top_p < 1:
        ordered, order = probs.sort(-1, descending=True)
        kept = ordered * (ordered.double().cumsum(-1) - ordered < settings.top_p)
        probs = torch.zeros_like(probs).scatter_(-1, order, kept / kept.sum(-1, keepdim=True))
    if settings.min_p:
        kept = probs * (probs >= settings.min_p * probs.amax(-1, keepdim=True))
        probs = kept / kept.sum(-1, keepdim=True)
    found = to_probs(logits, settings)
    assert torch.equal(found > 0, probs > 0)
    torch.testing.assert_close(found, probs)
    assert torch.equal(found, torch.cat([to_probs(row, settings) for row in logits.split(1)])), "alone and in company"


def test_of_equal_tokens_the_first_are_left() -> None:
    logits = torch.zeros(2, 5000)
    logits[0, 4000:] = 1
    found = to_probs(logits, SamplingSettings(temperature=1.0, top_p=0.2501))
    assert [row.nonzero()[:, 0].tolist() for row in found] == [list(range(4000, 4619)), list(range(1251))]


def test_what_is_no_number_stays_none() -> None:
    logits = torch.tensor([[1.0, torch.nan, 0.0], [1.0, 2.0, 0.0]])
    found = to_probs(logits, SamplingSettings(temperature=1.0, top_k=2, top_p=0.9, min_p=0.1))
    assert found.isnan().any(-1).tolist() == [True, False]


def some_logits() -> torch.Tensor:
    return torch.randn(40, 50, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 3


@pytest.mark.parametrize("cut", [{"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}], ids=str)
def test_what_truncation_cuts_off_keeps_its_share_of_a_draft(cut: dict[str, float]) -> None:
    truncated = to_probs(some_logits(), SamplingSettings(temperature=0.7, **cut))
    whole = to_probs(some_logits(), SamplingSettings(temperature=0.7))
    q = to_draft_probs(some_logits(), DraftSampling(temperature=0.7, tail_share=0.05, **cut))
    assert bool((truncated == 0).any())
    torch.testing.assert_close(q, 0.95 * truncated + 0.05 * whole)
    assert bool((q > 0).all())
    torch.testing.assert_close(q.sum(-1), torch.ones(40, dtype=torch.float64))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_where_nothing_is_cut_off_or_has_no_share_q_is_what_the_settings_say(temperature: float) -> None:
    for draft in (
        DraftSampling(temperature=temperature, tail_share=0.05),
        DraftSampling(temperature=temperature, top_p=0.8),
    ):
        same = SamplingSettings(temperature=temperature, top_p=draft.top_p)
        assert torch.equal(to_draft_probs(some_logits(), draft), to_probs(some_logits(), same))
