"""A long text through the layers: one pass over the weights, and one chunk's temporaries."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from edgespec import Engine, MemoryLimits, SamplingSettings
from edgespec.errors import EdgespecError
from edgespec.model.causal_model import PREFILL_ROWS, CausalModel
from edgespec.model.masks import MaskForm
from edgespec.pair.pair import DEMO_FOLDER, open_pair
from offload.stream import LayerStream
from tests.conftest import EAGER_ONLY, FAMILIES, VOCAB, make_model

CPU = torch.device("cpu")


def test_a_long_prompt_reads_every_layer_once(monkeypatch: pytest.MonkeyPatch) -> None:
    acquired: list[int] = []
    acquire = LayerStream.acquire

    def counted(self: LayerStream, layer: int) -> dict[str, torch.Tensor]:
        acquired.append(layer)
        return acquire(self, layer)

    monkeypatch.setattr(LayerStream, "acquire", counted)
    ids = (torch.arange(2 * PREFILL_ROWS + 76) % 2000).tolist()
    with Engine.from_pair(open_pair(None, None), limits=MemoryLimits(max_resident_layers=0)) as engine:
        result = engine.generate(ids, max_new_tokens=3, sampling=SamplingSettings(), seed=0)
    assert acquired[:8] == list(range(8))
    assert len(acquired) == 8 * (1 + len(result.passes))
    model = AutoModelForCausalLM.from_pretrained(DEMO_FOLDER / "target", dtype=torch.float32).eval()
    expected = model.generate(torch.tensor([ids]), max_new_tokens=3, do_sample=False)[0, len(ids) :].tolist()
    assert list(result.token_ids) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_sees_no_more_rows_than_a_chunk_has(family: str) -> None:
    config = FAMILIES[family]()
    config._attn_implementation = "eager" if family in EAGER_ONLY else "sdpa"
    model = make_model(config)
    causal = CausalModel(model, device=CPU, chunk_rows=16)
    rows: list[int] = []
    module = next(
        layer for name, layer in model.named_modules() if name.endswith(("layers.0.mlp", "h.0.mlp", "layers.0.fc1"))
    )
    module.register_forward_pre_hook(lambda _module, arguments: rows.append(arguments[0].shape[-2]))
    ids = torch.arange(41) % (VOCAB - 1)
    causal.reset(64)
    causal.prefill(ids[:20])
    more = causal.prefill(ids[20:])  # behind rows that are cached already
    assert rows == [16, 4, 16, 5]
    expected = model(input_ids=ids[None], use_cache=False).logits[0, -1]
    torch.testing.assert_close(more, expected, rtol=1e-4, atol=2e-5)


def test_a_family_that_swallows_the_mask_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    causal = CausalModel(make_model(FAMILIES["llama"]()), device=CPU, chunk_rows=16)
    monkeypatch.setattr(MaskForm, "stand_ins", lambda _self: None)
    causal.reset(64)
    with pytest.raises(EdgespecError, match="do not take the mask"):
        causal.prefill(torch.arange(20))
