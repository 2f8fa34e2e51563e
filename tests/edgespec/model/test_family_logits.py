"""The head apart: logits of any rows, in the family's own way, by a model that is left as it was."""

from dataclasses import replace

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from edgespec.model.causal_model import CausalModel
from edgespec.model.pass_rows import PassRows, next_rows
from edgespec.model.row_chunks import row_chunks, rows_at_once
from edgespec.model.text_cache import TextCache
from edgespec.placement.memory import PassShape, pass_bytes
from tests.support.families import FAMILIES, GROUPED, SMALL, make_model

CPU = torch.device("cpu")
# Families that do something behind the head; make_model's weights make it show
SCALED: dict[str, PretrainedConfig] = {
    "gemma2-cap": transformers.Gemma2Config(**GROUPED, head_dim=8, final_logit_softcapping=2.0),
    "cohere-scale": transformers.CohereConfig(**GROUPED, logit_scale=0.25),
    "granite-scaling": transformers.GraniteConfig(**GROUPED, logits_scaling=8.0),
    "opt-projected": transformers.OPTConfig(**SMALL, ffn_dim=64, word_embed_proj_dim=16),
}


def states_and_expected(model: PreTrainedModel, ids: Tensor) -> tuple[CausalModel, TextCache, Tensor, Tensor]:
    """The model, a text that it read as a tree that is a chain, its hidden states, and a plain forward's logits."""
    expected = model(input_ids=ids[None], use_cache=False).logits[0]
    causal = CausalModel(model, device=CPU)
    text = causal.new_text()
    chain = torch.ones(ids.shape[0], ids.shape[0], dtype=torch.bool).tril_()
    (hidden,) = causal.read([PassRows(cache=text, ids=ids, positions=torch.arange(ids.shape[0]), visible=chain)])
    return causal, text, hidden, expected


@pytest.mark.parametrize("family", [*FAMILIES, *SCALED])
def test_logits_of_any_rows_are_the_familys_own(family: str) -> None:
    config = SCALED[family] if family in SCALED else FAMILIES[family]()
    config._attn_implementation = "eager"
    model = make_model(config)
    causal, text, hidden, expected = states_and_expected(model, torch.arange(40, 54))
    assert hidden.shape == (14, model.get_output_embeddings().weight.shape[1])
    torch.testing.assert_close(causal.logits(hidden), expected, rtol=1e-4, atol=2e-5)
    some = torch.tensor([11, 2, 2, 7])
    torch.testing.assert_close(causal.logits(hidden[some]), expected[some], rtol=1e-4, atol=2e-5)
    assert text.length == 14, "the head appends no rows"


def test_the_decoder_is_its_own_again_also_after_an_error() -> None:
    model = make_model(FAMILIES["llama"]())
    causal, _, hidden, expected = states_and_expected(model, torch.arange(9))
    with pytest.raises(RuntimeError):
        causal.logits(torch.ones(2, 5))
    assert "forward" not in vars(model.model)
    again = causal.read([next_rows(causal.new_text(), torch.arange(9))])[0]
    torch.testing.assert_close(causal.logits(again), expected)

    calls = 0
    plain = model.model.forward

    def wrapped(*arguments: object, **named: object) -> object:
        nonlocal calls
        calls += 1
        return plain(*arguments, **named)

    model.model.forward = wrapped  # as accelerate's hooks do
    torch.testing.assert_close(causal.logits(hidden), expected)
    assert model.model.forward is wrapped
    assert calls == 0


@pytest.mark.parametrize(("num_rows", "vocab", "expected"), [(769, 152_000, 55), (3, 256, 32768), (2, 1 << 30, 1)])
def test_chunks_cover_all_rows_within_32_mib(num_rows: int, vocab: int, expected: int) -> None:
    assert rows_at_once(vocab) == expected
    chunks = list(row_chunks(num_rows, vocab))
    assert [row for chunk in chunks for row in range(chunk.start, chunk.stop)] == list(range(num_rows))
    assert max(chunk.stop - chunk.start for chunk in chunks) <= expected


def test_plans_count_a_chunk_of_logits_and_the_distributions_that_a_draft_keeps() -> None:
    shape = PassShape(prompt_rows=1, tree_rows=769, keys=800)
    small, large = transformers.LlamaConfig(**GROUPED), transformers.LlamaConfig(**{**GROUPED, "vocab_size": 152_000})
    row = 152_000 * 4
    target = pass_bytes(large, shape, dtype=torch.float32) - pass_bytes(small, shape, dtype=torch.float32)
    assert 2 * 55 * row < target < 10 * 55 * row
    with_probs = replace(shape, probs_rows=1538)
    draft = pass_bytes(large, with_probs, dtype=torch.float32) - pass_bytes(large, shape, dtype=torch.float32)
    assert draft > 3 * 1538 * row
