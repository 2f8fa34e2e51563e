"""Latent attention: few rows read latents as they are kept, and all rows do where an index chooses."""

import functools
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig

from edgespec.model.causal_model import CausalModel
from edgespec.model.mechanisms import latents as latent_attention
from edgespec.model.mechanisms.latents import attend_latents, use_latents
from edgespec.model.pass_cache import attended
from edgespec.model.pass_rows import PassRows, Span
from edgespec.model.text_cache import TextCache
from offload.checkpoint import read_checkpoint
from offload.quantized_cache import load_or_quantize
from offload.streamed_model import StreamedModel
from tests.edgespec.model.mechanisms import test_block_index as blocks
from tests.edgespec.model.mechanisms.test_indexed import FAMILIES, MIXTURE, PROMPT, has_indexed
from tests.edgespec.model.reader import Reader
from tests.edgespec.model.refusal import check_refuses
from tests.offload.streaming import CPU, skeleton_of, unlimited_placement
from tests.support.families import LATENT, SMALL, make_model, save_folder

GLM5_NEXT = "glm-5-next"
DENSE: dict[str, Callable[[], PretrainedConfig]] = {
    "deepseek-v3": lambda: transformers.DeepseekV3Config(**SMALL, **MIXTURE, **LATENT),
    "minicpm-3": lambda: transformers.MiniCPM3Config(**{**SMALL, "num_key_value_heads": 4}, **LATENT),
}
INDEXED = [*FAMILIES, *([GLM5_NEXT] if blocks.has_block_indexes() else [])]
PARENTS = (-1, 0, 0, 1, 1, 2, 4, 4, 7)  # of a tree's rows

pytestmark = pytest.mark.skipif(not has_indexed(), reason="this transformers has no such layers in our form")


def reader_of(family: str, *, keeps_row_bits: bool = False) -> Reader:
    configs = {**DENSE, **FAMILIES}
    model = blocks.model_of(family) if family == GLM5_NEXT else make_model(configs[family]())
    return Reader.of(model, keeps_row_bits=keeps_row_bits)


def expanded_by(reader: Reader, read: Callable[[], object]) -> list[int]:
    """How many latents are expanded, layer by layer."""
    counts: list[int] = []
    projections = [part for name, part in reader.causal.model.named_modules() if name.endswith("kv_b_proj")]
    hooks = [part.register_forward_pre_hook(lambda _, given: counts.append(given[0].shape[-2])) for part in projections]
    read()
    for hook in hooks:
        hook.remove()
    return counts


@pytest.mark.parametrize("family", [*DENSE, *INDEXED])
def test_few_rows_read_latents_as_they_are(family: str) -> None:
    """Alone, and as a tree."""
    reader = reader_of(family)
    reader.read_prompt(PROMPT)
    assert expanded_by(reader, lambda: reader.look(0, nodes=1)) == []
    assert expanded_by(reader, lambda: reader.look(0, nodes=3)) == []


@pytest.mark.parametrize("family", DENSE)
def test_rows_of_a_prompt_have_them_expanded(family: str) -> None:
    reader = reader_of(family)
    assert set(expanded_by(reader, lambda: reader.read_prompt(PROMPT))) == {PROMPT}


@pytest.mark.parametrize("family", INDEXED)
def test_rows_that_choose_never_have_them_expanded(family: str) -> None:
    reader = reader_of(family)
    assert expanded_by(reader, lambda: reader.read_prompt(PROMPT)) == []


def test_what_costs_less_is_counted_in_products() -> None:
    """DeepSeek-V3 has heads of 128, 64 and 128 numbers, and latents of 512: up to 169 rows of a long text."""
    for num_latents, most in ((32_000, 169), (100, 63)):
        latents = torch.empty(1, 1, num_latents, 512)
        for num_rows, costs_less in ((most, True), (most + 1, False)):
            query = torch.empty(1, 4, num_rows, 192)
            assert latent_attention._costs_less(query, latents, 64, 128) is costs_less


@pytest.mark.parametrize("family", [*DENSE, *INDEXED])
def test_rows_that_are_read_one_by_one_have_the_logits_of_paths(family: str) -> None:
    reader = reader_of(family, keeps_row_bits=True)
    reader.read_prompt(PROMPT)
    for node in (5, 0, None):
        reader.look(node)


class _Layer:
    """A random layer of DeepSeek V3.2, or of V3, with a text of latents and a tree of rows behind it."""

    def __init__(self, *, chosen: int | None, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(1)
        sizes: dict[str, Any] = {**SMALL, **MIXTURE, **LATENT}
        if chosen is None:
            config: Any = transformers.DeepseekV3Config(**sizes)
            kind: Any = transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3Attention
        else:
            config = transformers.DeepseekV32Config(**sizes, index_topk=chosen, index_n_heads=4, index_head_dim=16)
            kind = transformers.models.deepseek_v32.modeling_deepseek_v32.DeepseekV32Attention
        config._attn_implementation = "eager"
        self.module = kind(config, 0).to(dtype)
        self.context, self.num_rows = 700, len(PARENTS)
        num_keys = self.context + self.num_rows
        random = functools.partial(torch.randn, dtype=dtype)
        self.query = random(1, config.num_attention_heads, self.num_rows, 16)
        self.latents, self.rotated = random(1, 1, num_keys, 16), random(1, 1, num_keys, 8)
        least = torch.finfo(dtype).min
        self.paths: list[list[int]] = []
        self.mask = torch.zeros(self.num_rows, num_keys, dtype=dtype)
        self.mask[:, self.context :] = least
        self.mask[:, :3] = least
        for row, parent in enumerate(PARENTS):
            self.paths.append([*(self.paths[parent] if row else []), row])
            self.mask[row, [self.context + place for place in self.paths[row]]] = 0
        self.indices = None
        if chosen is not None:  # also of those that a row does not see, for want of others
            rows = [torch.randperm(self.context)[:chosen] for _ in range(self.num_rows)]
            self.indices = torch.stack(rows)
            self.indices[:, 0], self.indices[:, 1] = 1, torch.arange(self.num_rows) + self.context  # itself
            self.indices[:, 2] = self.context  # the root
            self.indices[::3, 4] = 2

    def read(
        self, rows: list[int], places: Tensor | None = None, *, indices: Tensor | None = None, **named: Any
    ) -> Tensor:
        """The attention of some rows, to the latents at some places."""
        places = torch.arange(self.latents.shape[2]) if places is None else places
        visible = torch.eye(len(rows), dtype=torch.bool)
        ids, positions = torch.zeros(len(rows), dtype=torch.long), torch.zeros(len(rows))
        part = PassRows(cache=TextCache(1), ids=ids, positions=positions, visible=visible)
        of = (self.query[:, :, rows], self.latents[:, :, places], self.rotated[:, :, places])
        mask = self.mask[rows][:, places][None, None]
        given = indices if indices is not None or self.indices is None else self.indices[rows]
        named |= {"indices": None if given is None else given[None].int(), "scaling": 0.2}
        call = functools.partial(attend_latents, self.module, *of, mask, **named)
        return attended([Span(part, 0, len(rows))], call)[0]

    def expected(self, sinks: Tensor | None = None) -> Tensor:
        """The same by expanded keys and values and a mask of all of them: [1, m, heads, v]."""
        keys, values = type(self.module).expand_kv(self.module, self.latents, self.rotated)
        scores = (self.query.double() @ keys.double().mT) * 0.2 + self.mask
        if self.indices is not None:
            hidden = torch.ones_like(self.mask, dtype=torch.bool).scatter_(1, self.indices, value=False)
            scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(-1, -1, self.num_rows, -1)], 3)
        weights = scores.softmax(3)[..., : keys.shape[2]]
        found: Tensor = (weights @ values.double()).transpose(1, 2)
        return found


@pytest.mark.parametrize("keeps_row_bits", [False, True], ids=["at-once", "row-by-row"])
@pytest.mark.parametrize("has_sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("chosen", [None, 64], ids=["all", "chosen"])
@torch.no_grad()
def test_rows_read_what_expanded_latents_give(chosen: int | None, has_sinks: bool, keeps_row_bits: bool) -> None:
    layer = _Layer(chosen=chosen)
    sinks = torch.randn(layer.query.shape[1]) if has_sinks else None
    expected = layer.expected(sinks)
    use_latents(layer.module, keeps_row_bits=keeps_row_bits)
    found = layer.read(list(range(layer.num_rows)), s_aux=sinks)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_place_that_is_named_twice_is_read_once() -> None:
    """Rows that were scored apart from others fill their choice with its last place."""
    layer = _Layer(chosen=64)
    use_latents(layer.module)
    twice = torch.cat([layer.indices, layer.indices[:, -1:].expand(-1, 5)], 1)
    rows = list(range(layer.num_rows))
    torch.testing.assert_close(layer.read(rows, indices=twice), layer.read(rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("chosen", [None, 64], ids=["all", "chosen"])
@torch.no_grad()
def test_a_trees_row_has_the_bits_that_it_has_alone(chosen: int | None, dtype: torch.dtype) -> None:
    """With branches beside its own, and without them: the order of each sum shows."""
    layer = _Layer(chosen=chosen, dtype=dtype)
    use_latents(layer.module, keeps_row_bits=True)
    found = layer.read(list(range(layer.num_rows)))
    for row, path in enumerate(layer.paths):
        text = torch.cat([torch.arange(layer.context), layer.context + torch.tensor(path)])
        indices = None
        if layer.indices is not None:  # scores come in another order
            indices = torch.searchsorted(text, layer.indices[row : row + 1])[:, torch.randperm(layer.indices.shape[1])]
        assert torch.equal(found[:, row], layer.read([row], text, indices=indices)[:, 0])


def test_a_closed_model_expands_by_itself_again() -> None:
    reader = reader_of("glm-5")
    modules: list[Any] = [part for part in reader.causal.model.modules() if hasattr(part, "expand_kv")]
    assert modules
    assert all(part.config._attn_implementation == latent_attention.NAME for part in modules)
    reader.causal.close()
    assert not any({"expand_kv", "latents"} & set(vars(part)) for part in modules)
    assert all(part.config is reader.causal.model.config for part in modules)


def _reads_the_first_latents(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the places that rows chose were counted among these."""
    chosen = latent_attention._chosen
    monkeypatch.setattr(
        latent_attention, "_chosen", lambda *given: torch.arange(given[1].shape[1]).expand_as(chosen(*given))
    )


def test_the_self_check_refuses_latents_that_no_row_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    check_refuses(FAMILIES["deepseek-v3.2"], _reads_the_first_latents, monkeypatch)


@pytest.mark.parametrize("resident", [0, None], ids=["streamed", "resident"])
@pytest.mark.parametrize("quant", [None, "nf4", "int4", "int8"])
def test_weights_are_read_as_they_are_stored(quant: str | None, resident: int | None, tmp_path: Path) -> None:
    """Where they are packed, they are unpacked for it."""
    sizes: dict[str, Any] = {**SMALL, "hidden_size": 64, **MIXTURE, **LATENT, "kv_lora_rank": 64}
    model = make_model(transformers.DeepseekV3Config(**sizes), dtype=torch.bfloat16)
    save_folder(tmp_path / "model", model)  # which is read in float32
    checkpoint = read_checkpoint(tmp_path / "model")
    if quant is not None:
        whole = skeleton_of(tmp_path / "model", checkpoint=checkpoint)
        checkpoint = load_or_quantize(whole, checkpoint, quant, cache_folder=tmp_path / "cache", device=CPU)
    with ExitStack() as stack:
        models = []
        for _ in range(2):
            skeleton = skeleton_of(tmp_path / "model", checkpoint=checkpoint)
            placement = unlimited_placement(skeleton, resident=resident)
            models.append(stack.enter_context(closing(StreamedModel(skeleton, placement, device=CPU))).model)
        names = {name for name, part in models[0].named_modules() if "weight_packed" in part._modules}
        assert any(name.endswith("kv_b_proj") for name in names) == (quant is not None)
        reader = Reader(models[0], CausalModel(models[1], device=CPU), 4)
        reader.read_prompt(PROMPT)
        assert expanded_by(reader, lambda: reader.look(None, nodes=3)) == []
