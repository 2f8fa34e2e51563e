"""Quantised layers: what bitsandbytes makes of a weight is what a module computes with, wherever it streams from."""

import dataclasses
import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from offload.architecture import architecture_checkpoint
from offload.checkpoint import Checkpoint, read_checkpoint
from offload.errors import CheckpointError
from offload.formats.bitsandbytes_4bit import FORMATS_4BIT, NF4, Bitsandbytes4Bit, bitsandbytes_functional
from offload.formats.bitsandbytes_int8 import INT8
from offload.layouts import bitsandbytes, known
from offload.layouts.known import kernel_of, quantizer
from offload.layouts.layout import Kernel
from offload.packed_weight import PackedModule, PackedWeight
from offload.quantize import quantized_checkpoint
from offload.quantized_cache import load_or_quantize
from offload.skeleton import Skeleton, build_skeleton, match_again
from tests.offload.formats.bitsandbytes_checkpoints import block_scales, looked_up, published
from tests.offload.formats.whole_steps import WholeSteps
from tests.offload.streaming import CPU, logits, skeleton_of, streamed_logits, unlimited_placement
from tests.support.families import FAMILIES, RECURRENT, make_model, save_folder

FAMILIES_TRIED = ["llama-bias", "gpt2", "phi3", "qwen3-moe", "mixtral"]


def weight_of(model: PreTrainedModel, name: str) -> tuple[nn.Module, str, Tensor]:
    module_name, _, attribute = name.rpartition(".")
    module = model.get_submodule(module_name)
    return module, attribute, module.get_parameter(attribute)


def with_rounded_weights(model: PreTrainedModel, quant: str) -> PreTrainedModel:
    """The model with its decoder layers' matrices replaced by what quantising makes of them."""
    for name, parameter in model.named_parameters():
        module = weight_of(model, name)[0]
        is_matrix = isinstance(module, (nn.Linear, Conv1D)) and name.endswith("weight")
        is_matrix |= parameter.dim() == 3 and not isinstance(module, nn.Conv1d)
        if ("layers." in name or ".h." in name) and is_matrix:
            shape = tuple(parameter.shape)
            known = quantizer(quant)
            if min(shape[-2:]) == 1 or not known.packs(shape):
                continue  # such weights stay as they are
            packing, parts = (known if len(shape) == 2 else known.for_shares(shape, shape[0])).pack(parameter)
            parameter.copy_(packing.unpack(parts, torch.empty(shape)))
    return model


def logits_of(folder: Path, checkpoint: Checkpoint, *, resident: int) -> Tensor:
    skeleton = skeleton_of(folder, checkpoint=checkpoint)
    return streamed_logits(skeleton, unlimited_placement(skeleton, resident=resident))


def quantized(folder: Path, quant: str, cache: Path) -> Checkpoint:
    checkpoint = read_checkpoint(folder)
    skeleton = skeleton_of(folder, checkpoint=checkpoint)
    return load_or_quantize(skeleton, checkpoint, quant, cache_folder=cache, device=CPU)


def num_scratch(skeleton: Skeleton) -> int:
    return skeleton.num_scratch(torch.float32, CPU)


@pytest.mark.parametrize("quant", ["int8", "nf4"])
@pytest.mark.parametrize("family", FAMILIES_TRIED)
def test_streamed_and_resident_logits_are_those_of_the_rounded_weights(family: str, quant: str, tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "model", make_model(FAMILIES[family](), dtype=torch.bfloat16), shard="20KB")
    checkpoint = quantized(folder, quant, tmp_path / "cache")
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    unrounded = logits(plain)
    with torch.no_grad():
        expected = logits(with_rounded_weights(plain, quant))
    assert (unrounded - expected).abs().max() > 1e-3  # rounding shows, or the comparison would say nothing
    for resident in (0, 1, 3):
        torch.testing.assert_close(logits_of(folder, checkpoint, resident=resident), expected, rtol=0, atol=1e-5)


def test_a_weight_that_its_owner_multiplies_by_hand_is_not_packed(tmp_path: Path) -> None:
    """Mamba reads its time steps' weight without a call of the layer, where an unpacked one would not be there."""
    folder = save_folder(tmp_path / "model", make_model(RECURRENT["mamba"]()))
    checkpoint = quantized(folder, "nf4", tmp_path / "cache")
    assert any("in_proj.weight.absmax" in name for name in checkpoint.tensors)
    assert not any("dt_proj.weight.absmax" in name for name in checkpoint.tensors)
    resident = logits_of(folder, checkpoint, resident=3)
    assert resident.isfinite().all()
    torch.testing.assert_close(logits_of(folder, checkpoint, resident=0), resident, rtol=0, atol=1e-5)


def test_a_new_format_needs_a_line_in_the_list_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planned, packed into the cache, found again, detected and computed with."""
    monkeypatch.setattr(known, "FORMATS", (*known.FORMATS, WholeSteps()))
    monkeypatch.setattr(known, "QUANTIZERS", (*known.QUANTIZERS, WholeSteps()))
    folder = save_folder(tmp_path / "model", make_model(FAMILIES["llama"](), dtype=torch.bfloat16))
    checkpoint = quantized(folder, "steps", tmp_path / "cache")
    assert quantized(folder, "steps", tmp_path / "cache") == checkpoint
    skeleton = skeleton_of(folder, checkpoint=checkpoint)
    assert skeleton.packed_formats == ("steps",)
    plain = read_checkpoint(folder)
    planned = quantized_checkpoint(skeleton_of(folder), plain, "steps")
    assert num_scratch(skeleton_of(folder, checkpoint=planned)) == num_scratch(skeleton) > 0
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = logits(with_rounded_weights(model, "steps"))
    for resident in (0, 3):
        torch.testing.assert_close(logits_of(folder, checkpoint, resident=resident), expected, rtol=0, atol=1e-5)
    with pytest.raises(CheckpointError, match=r"quantised already \(steps\)"):
        quantized_checkpoint(skeleton, checkpoint, "steps")


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3-images", "qwen3-moe"])
def test_a_module_graph_that_is_matched_again_is_as_a_new_one(family: str, tmp_path: Path) -> None:
    """Plain, as it will be in int8, plain again, and in int8 as it is in the cache."""
    folder = save_folder(tmp_path / "model", make_model(FAMILIES[family](), dtype=torch.bfloat16))
    config, plain = AutoConfig.from_pretrained(folder), read_checkpoint(folder)
    skeleton = build_skeleton(config, plain, dtype=torch.float32)
    num_unread, graph = skeleton.num_unread, skeleton.model
    planned = quantized_checkpoint(skeleton, plain, "int8")
    for checkpoint in (planned, plain, quantized(folder, "int8", tmp_path / "cache")):
        skeleton = match_again(skeleton, config, checkpoint)
        new = build_skeleton(config, checkpoint, dtype=torch.float32)
        assert skeleton.model is graph
        assert (skeleton.records, skeleton.outside, skeleton.ties) == (new.records, new.outside, new.ties)
        assert skeleton.packed_formats == new.packed_formats
        assert num_scratch(skeleton) == num_scratch(new)
        assert [group.names for group in skeleton.expert_groups] == [group.names for group in new.expert_groups]
        own, others = (set(dict(model.named_modules())) for model in (skeleton.model, new.model))
        assert own == others
        assert skeleton.num_unread == num_unread


@pytest.mark.parametrize("quant", ["int8", "nf4"])
@pytest.mark.parametrize("family", FAMILIES_TRIED)
def test_sizes_are_known_before_anything_is_quantised(
    family: str, quant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offload.layouts.bitsandbytes.is_available", lambda: False)  # else nothing is unpacked
    folder = save_folder(tmp_path / "model", make_model(FAMILIES[family](), dtype=torch.bfloat16))
    config = AutoConfig.from_pretrained(folder)
    real = skeleton_of(folder, checkpoint=quantized(folder, quant, tmp_path / "cache"))
    for source in (read_checkpoint(folder), architecture_checkpoint(config, folder)):
        skeleton = skeleton_of(folder, checkpoint=source)
        planned = skeleton_of(folder, checkpoint=quantized_checkpoint(skeleton, source, quant))
        assert [r.stored_bytes for r in planned.records] == [r.stored_bytes for r in real.records]
        assert [r.flat_bytes for r in planned.records] == [r.flat_bytes for r in real.records]
        assert num_scratch(planned) == num_scratch(real) > 0


@pytest.mark.parametrize("kind", ["int8", "nf4", "nf4-nested", "fp4"])
def test_checkpoints_published_by_bitsandbytes_load_as_they_are(kind: str, tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "model", make_model(FAMILIES["llama"](), dtype=torch.bfloat16))
    functional = bitsandbytes_functional()
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if name.endswith("proj.weight"):
                if kind == "int8":
                    packed, scale, _ = functional.int8_vectorwise_quant(parameter.half())
                    parameter.copy_(functional.int8_vectorwise_dequant(packed, scale))
                else:
                    stored = parameter.to(torch.bfloat16)
                    packed, state = functional.quantize_4bit(
                        stored, compress_statistics=kind.endswith("nested"), quant_type=kind[:3], blocksize=64
                    )
                    parameter.copy_(looked_up(packed, block_scales(state), tuple(parameter.shape), kind[:3]))
    expected = logits(plain)
    checkpoint = read_checkpoint(published(folder, kind))
    torch.testing.assert_close(logits_of(folder, checkpoint, resident=1), expected, rtol=0, atol=1e-5)


def edit(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> Checkpoint:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return read_checkpoint(folder)


def edit_state(tensors: dict[str, Tensor], **changes: object) -> None:
    name = next(name for name in tensors if "quant_state" in name)
    state = json.loads(bytes(tensors[name].tolist())) | changes
    tensors[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


def drop_scales(tensors: dict[str, Tensor]) -> None:
    del tensors[next(name for name in tensors if name.endswith("SCB"))]


@pytest.mark.parametrize(
    ("kind", "damage", "named"),
    [
        ("nf4-nested", lambda tensors: edit_state(tensors, blocksize=0), "blocks of 0"),
        ("nf4-nested", lambda tensors: edit_state(tensors, nested_offset=float("nan")), "offset of nan"),
        ("nf4-nested", lambda tensors: edit_state(tensors, shape=[64, 32]), "packed as"),
        ("int8", drop_scales, "without scales"),
        (
            "int8",
            lambda tensors: next(t for name, t in tensors.items() if "format" in name).fill_(1),
            "not stored as rows",
        ),
    ],
    ids=["block-size", "offset", "transposed", "no-scales", "layout"],
)
def test_a_packing_that_is_not_understood_is_refused_by_name(
    kind: str, damage: Callable[[dict[str, Tensor]], None], named: str, tmp_path: Path
) -> None:
    folder = save_folder(tmp_path / "model", make_model(FAMILIES["llama-bias"](), dtype=torch.bfloat16))
    checkpoint = edit(published(folder, kind), damage)
    with pytest.raises(CheckpointError, match=named) as caught:
        skeleton_of(folder, checkpoint=checkpoint)
    assert caught.value.code == "E_QUANTIZED"


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe"])
def test_experts_that_were_quantised_one_by_one_are_refused(family: str, tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "model", make_model(FAMILIES[family](), dtype=torch.bfloat16))

    def quantise_experts(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if ".experts." in name]:
            _, parts = INT8.pack(tensors[name])
            tensors[name], tensors[name.replace("weight", "SCB")] = parts["packed"], parts["scale"]

    checkpoint = edit(folder, quantise_experts)
    with pytest.raises(CheckpointError, match="one by one"):
        skeleton_of(folder, checkpoint=checkpoint)


def test_a_packed_table_that_the_head_is_tied_to_is_refused(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "model", make_model(FAMILIES["llama"](), dtype=torch.bfloat16))

    def quantise_table(tensors: dict[str, Tensor]) -> None:
        _, parts = INT8.pack(tensors["model.embed_tokens.weight"])
        tensors |= {"model.embed_tokens.weight": parts["packed"], "model.embed_tokens.SCB": parts["scale"]}

    with pytest.raises(CheckpointError, match="tied to it"):
        skeleton_of(folder, checkpoint=edit(folder, quantise_table))


def test_a_packed_head_beside_a_plain_table_is_read(tmp_path: Path) -> None:
    """The config ties them; what is stored says otherwise."""
    folder = save_folder(tmp_path / "model", make_model(FAMILIES["llama"](), dtype=torch.bfloat16))
    head = torch.randn(257, 32).bfloat16()

    def add_head(tensors: dict[str, Tensor]) -> None:
        _, parts = INT8.pack(head)
        tensors |= {"lm_head.weight": parts["packed"], "lm_head.SCB": parts["scale"]}

    found = logits_of(folder, edit(folder, add_head), resident=0)
    config = AutoConfig.from_pretrained(folder)
    config.tie_word_embeddings = False
    plain = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    with torch.no_grad():
        plain.lm_head.weight.copy_(INT8.unpack(INT8.pack(head)[1], torch.empty(257, 32)))
    torch.testing.assert_close(found, logits(plain), rtol=0, atol=1e-5)


def test_a_forward_that_raises_lets_the_unpacked_weight_go(tmp_path: Path) -> None:
    packed = PackedWeight((4, 64), INT8)
    for part, value in INT8.pack(torch.randn(4, 64))[1].items():
        packed._parameters[part] = nn.Parameter(value, requires_grad=False)
    module = nn.Linear(64, 4, bias=False, device="meta")
    PackedModule(module, [("weight", packed)]).hook(torch.empty(4 * 64), ExitStack())
    assert module(torch.ones(1, 64)).shape == (1, 4)
    with pytest.raises(RuntimeError):
        module(torch.ones(1, 3))
    assert module.weight.is_meta


def test_what_is_quantised_is_not_quantised_again(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "model", make_model(FAMILIES["llama"](), dtype=torch.bfloat16))
    published(folder, "nf4-nested")
    with pytest.raises(CheckpointError, match="quantised already") as caught:
        quantized(folder, "int8", tmp_path / "cache")
    assert caught.value.code == "E_QUANTIZED"


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("name", ["nf4", "fp4"])
def test_few_rows_are_multiplied_with_the_packed_weight(
    name: str, nested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kernel(stored: Bitsandbytes4Bit, shape: tuple[int, ...], dtype: torch.dtype, _: torch.device) -> Kernel | None:
        found = bitsandbytes.BITSANDBYTES_4BIT.kernel(stored, shape, dtype, torch.device("cuda"))
        return None if found is None else dataclasses.replace(found, max_rows=3)

    # It is for cards, and the CPU computes the same.
    monkeypatch.setattr(known, "LAYOUTS", (dataclasses.replace(bitsandbytes.BITSANDBYTES_4BIT, kernel=kernel),))
    torch.manual_seed(3)
    weight, bias, shape = torch.randn(24, 128) + 0.2, torch.randn(24), (24, 128)
    known_format = {known_format.name: known_format for known_format in FORMATS_4BIT}[name]
    packing, parts = known_format.pack(weight)
    if not nested:
        parts = {"packed": parts["packed"], "absmax": packing.block_scales(parts)}
        packing = dataclasses.replace(packing, nested=False)
    packed = PackedWeight(shape, packing)
    for part, value in parts.items():
        packed._parameters[part] = nn.Parameter(value, requires_grad=False)
    module = nn.Linear(128, 24)
    module.weight = nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)
    module.bias = nn.Parameter(bias, requires_grad=False)
    own = module.forward
    scratch = torch.zeros(24 * 128)
    hooks = ExitStack()
    PackedModule(module, [("weight", packed)]).hook(scratch, hooks)
    unpacked = packing.unpack(parts, torch.empty(shape))
    for rows in (torch.randn(1, 128), torch.randn(1, 3, 128)):
        torch.testing.assert_close(module(rows), rows @ unpacked.T + bias, rtol=0, atol=1e-4)
        assert not scratch.any()  # nothing was unpacked
    rows = torch.randn(4, 128)
    torch.testing.assert_close(module(rows), rows @ unpacked.T + bias, rtol=0, atol=1e-4)
    assert torch.equal(scratch, unpacked.view(-1))
    hooks.close()
    assert module.forward == own


def test_a_card_multiplies_few_rows_where_no_block_straddles_the_rows_of_the_weight() -> None:
    card, bf16 = torch.device("cuda"), torch.bfloat16
    assert kernel_of(NF4, (24, 128), bf16, card).max_rows == 4
    assert kernel_of(NF4, (64, 24), bf16, card) is None
    assert kernel_of(NF4, (2, 24, 128), bf16, card) is None
    assert kernel_of(NF4, (24, 128), bf16, CPU) is None


@pytest.mark.parametrize("quant", ["int4", "nf4-cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_for_a_kernel_computes_with_the_rounded_weights(dtype: torch.dtype, quant: str, tmp_path: Path) -> None:
    """What is multiplied as it is packed rounds activations, to 15 bits or to bf16."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    folder = save_folder(tmp_path / "model", make_model(config, dtype=torch.bfloat16))
    checkpoint = quantized(folder, quant, tmp_path / "cache")
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    unrounded = logits(plain)
    with torch.no_grad():
        expected = logits(with_rounded_weights(plain, quant))
    difference = (unrounded - expected).abs().max()
    for resident in (0, 3):
        skeleton = skeleton_of(folder, dtype, checkpoint=checkpoint)
        assert skeleton.packed_formats == (quant,)
        found = streamed_logits(skeleton, unlimited_placement(skeleton, resident=resident)).float()
        assert (found - expected).abs().max() < difference / (30 if dtype == torch.float32 else 3)


@pytest.mark.parametrize("kind", ["nf4", "nf4-nested", "fp4"])
def test_published_numbers_are_multiplied_in_the_order_of_the_kernel(kind: str, tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    folder = published(save_folder(tmp_path / "model", make_model(config, dtype=torch.bfloat16)), kind)
    checkpoint = read_checkpoint(folder)
    planned = quantized_checkpoint(skeleton_of(folder), checkpoint, "nf4-cpu")
    made = quantized(folder, "nf4-cpu", tmp_path / "cache")
    assert {name: (entry.shape, entry.dtype) for name, entry in made.tensors.items()} == {
        name: (entry.shape, entry.dtype) for name, entry in planned.tensors.items()
    }
    assert skeleton_of(folder, checkpoint=made).packed_formats == ("nf4-cpu",)
    found, expected = (logits_of(folder, stored, resident=2) for stored in (made, checkpoint))
    assert (found - expected).norm() / expected.norm() < 0.01  # of scales in bf16
