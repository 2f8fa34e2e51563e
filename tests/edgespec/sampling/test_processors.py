"""Processors of logits beside the definitions: transformers' own processors, and OpenAI's formula."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from edgespec.config import SamplingSettings
from edgespec.errors import EdgespecError
from edgespec.sampling.logprobs import token_logprobs
from edgespec.sampling.processors import LogitProcessors

VOCAB = 12
CPU = torch.device("cpu")
FLOAT32 = {"rtol": 2e-6, "atol": 1e-6}  # penalties are kept in it


def by_definition(
    logits: Tensor, sampling: SamplingSettings, prompt: list[int], new: list[int], ruled_out: list[int]
) -> Tensor:
    """Logits [1, vocab] behind a prompt and new tokens; all of them count for repetition, the new for the others."""
    wanted: list[Any] = []
    if sampling.logit_bias:
        wanted.append(
            SequenceBiasLogitsProcessor([[[token], float(bias)] for token, bias in dict(sampling.logit_bias).items()])
        )
    if sampling.repetition_penalty != 1:
        wanted.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    scores = LogitsProcessorList(wanted)(torch.tensor([prompt + new]), logits.clone())
    for token in range(VOCAB):  # OpenAI: mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence
        count = new.count(token)
        scores[0, token] -= count * sampling.frequency_penalty + float(count > 0) * sampling.presence_penalty
    if ruled_out:
        scores = SuppressTokensLogitsProcessor(ruled_out)(torch.tensor([prompt + new]), scores)
    return scores


tokens = st.lists(st.integers(0, VOCAB - 1), max_size=6)
penalties = st.builds(
    SamplingSettings,
    repetition_penalty=st.just(1.0) | st.floats(0.5, 2),
    presence_penalty=st.just(0.0) | st.floats(-2, 2),
    frequency_penalty=st.just(0.0) | st.floats(-2, 2),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=3),
)


@settings(max_examples=100, deadline=None)
@given(
    sampling=penalties, prompt=tokens.filter(bool), before=tokens, new=tokens, path=tokens,
    ruled_out=st.lists(st.integers(0, VOCAB - 1), max_size=2), seed=st.integers(0, 999), least=st.integers(0, 9),
)  # fmt: skip
def test_logits_become_what_transformers_and_openai_make_of_them(
    sampling: SamplingSettings, prompt: list[int], before: list[int], new: list[int], path: list[int],
    ruled_out: list[int], seed: int, least: int,
) -> None:  # fmt: skip
    """Whether new tokens were there when the text went on, came with a step, or stand on a path."""
    ends = [3, VOCAB - 1]
    logits = 3 * torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    given_logits = logits.clone()
    processors = LogitProcessors(
        sampling, ruled_out=ruled_out, matcher=None, vocab=VOCAB, device=CPU, stop_tokens=ends, min_new_tokens=least
    )
    processors.begin(prompt, before)
    processors.add(new)

    def never(text: list[int]) -> list[int]:
        return ruled_out + (ends if len(text) < least else [])

    for _ in range(2):  # a path changes nothing for the next one
        text = before + new + path
        expected = by_definition(logits, sampling, prompt, text, never(text))
        torch.testing.assert_close(processors(logits, path), expected, **FLOAT32)
    expected = by_definition(logits, sampling, prompt, before + new, never(before + new))
    torch.testing.assert_close(processors(logits), expected, **FLOAT32)
    assert torch.equal(logits, given_logits), "the model's own are asked for too"


def test_a_draft_of_fewer_tokens_has_the_texts_penalties() -> None:
    sampling = SamplingSettings(repetition_penalty=1.5, presence_penalty=1.0, logit_bias={11: 5, 0: 1})
    processors = LogitProcessors(sampling, ruled_out=[2], matcher=None, vocab=VOCAB, device=CPU)
    processors.begin([1, 9], [3])
    logits = torch.randn(4, VOCAB - 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole = torch.nn.functional.pad(logits, (0, 2))
    expected = torch.cat([by_definition(row[None], sampling, [1, 9], [3], [2]) for row in whole])
    torch.testing.assert_close(processors.on_draft(logits, [(3,)] * 4), expected[:, : VOCAB - 2])


class OnlyOdd:
    """A grammar of odd tokens, and behind any path of none but the last."""

    def add(self, tokens: Sequence[int]) -> None:
        pass

    def allowed(self, path: Sequence[int]) -> Tensor:
        return torch.arange(VOCAB) == VOCAB - 1 if path else torch.arange(VOCAB) % 2 == 1

    def likely(self, path: Sequence[int]) -> list[int]:
        return []


def test_each_node_of_a_draft_has_the_grammars_mask_of_its_own_path() -> None:
    processors = LogitProcessors(SamplingSettings(), ruled_out=(), matcher=OnlyOdd(), vocab=VOCAB, device=CPU)
    odd, last = [False, True] * (VOCAB // 2), [False] * (VOCAB - 1) + [True]
    assert processors.on_draft(torch.zeros(2, VOCAB), [(), (3,)]).isfinite().tolist() == [odd, last]
    # A draft that has none of the tokens that may come is left alone: it must have some distribution.
    assert processors.on_draft(torch.zeros(2, VOCAB - 2), [(3,), ()]).isfinite().tolist() == [
        [True] * (VOCAB - 2),
        odd[: VOCAB - 2],
    ]
    without_last = torch.zeros(1, VOCAB).index_fill(1, torch.tensor(VOCAB - 1), -torch.inf)
    assert processors.on_draft(without_last, [(3,)]).isfinite().tolist() == [[True] * (VOCAB - 1) + [False]]


def test_half_precision_is_penalised_in_float32() -> None:
    processors = LogitProcessors(
        SamplingSettings(frequency_penalty=0.01), ruled_out=(), matcher=None, vocab=VOCAB, device=CPU
    )
    processors.begin([], [3])
    assert float(processors(torch.full((1, VOCAB), 16.0, dtype=torch.bfloat16))[0, 3]) == pytest.approx(15.99)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"repetition_penalty": 0}, r"`repetition_penalty=0` is not in \(0, 100\)"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty=nan"),
        ({"presence_penalty": 2.1}, r"`presence_penalty=2.1` is not in \[-2, 2\]"),
        ({"frequency_penalty": -3}, "frequency_penalty=-3"),
        ({"logit_bias": {4: 101}}, r"`logit_bias` of 4 is 101, which is not in \[-100, 100\]"),
        ({"logit_bias": {4: float("nan")}}, "`logit_bias` of 4 is nan"),
        ({"logit_bias": {-4: 1}}, "`logit_bias` has -4, which is no token"),
        ({"logit_bias": {"": 1}}, "`logit_bias` has '', which is no token"),
    ],
)
def test_values_out_of_range_are_refused_by_name(values: dict[str, Any], said: str) -> None:
    with pytest.raises(EdgespecError, match=said):
        SamplingSettings(**values)


def test_a_bias_given_in_another_order_is_the_same_setting() -> None:
    first, second = (SamplingSettings(logit_bias=bias) for bias in ({3: 1.0, " a": 2.0}, {" a": 2.0, 3: 1.0}))
    assert first == second
    assert hash(first) == hash(second)
    assert first.penalises
    assert first.unpenalised() == SamplingSettings()
    assert not SamplingSettings(temperature=1, top_p=0.5).penalises


def test_logprobs_are_those_of_the_logits_as_they_are() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    found = token_logprobs(logits, [4, 0, 7], 3)
    for row, token, told in zip(logits.log_softmax(-1), [4, 0, 7], found, strict=True):
        assert told.token == token
        assert told.logprob == pytest.approx(float(row[token]), abs=1e-5)
        assert [index for index, _ in told.top] == row.argsort(descending=True)[:3].tolist()
        assert [value for _, value in told.top] == pytest.approx(
            row.sort(descending=True).values[:3].tolist(), abs=1e-5
        )
    assert [told.top for told in token_logprobs(logits, [4, 0, 7], 0)] == [(), (), ()]
