"""Published weights of four bits in the order of a CPU's kernel keep their numbers; all others stay in their files."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import GptOssConfig, LlamaConfig, Qwen3MoeConfig

from offload.checkpoint import Checkpoint, read_checkpoint
from offload.layer_store import LayerStore
from offload.layouts import int4, known
from offload.layouts.int4 import INT4_LAYOUT, Int4
from offload.layouts.int4_orders import ORDERS
from offload.layouts.known import REPACKED
from offload.layouts.nf4_cpu import kernel_is_there
from offload.packed_weight import PackedWeight
from offload.quantize import quantized_checkpoint
from offload.quantized_cache import load_or_quantize
from offload.skeleton import Skeleton
from tests.offload.experts.mixtures import found_logits
from tests.offload.formats import definitions
from tests.offload.formats.bitsandbytes_checkpoints import published as publish_bitsandbytes
from tests.offload.formats.definitions import PUBLISHED
from tests.offload.formats.published_checkpoints import publish, publish_gpt_oss, save
from tests.offload.streaming import CPU, skeleton_of
from tests.support.families import VOCAB, make_model, save_folder

# Keys and values have 16 rows, which no kernel takes; 96 rows are no blocks of 64, as int4 has them.
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 256, "bos_token_id": None,
    "eos_token_id": 256, "pad_token_id": 256,
}  # fmt: skip
MODELS = {
    "llama": LlamaConfig(**SIZES),
    "mixture": Qwen3MoeConfig(**SIZES, moe_intermediate_size=32, num_experts=12, num_experts_per_tok=3),
    "gpt-oss": GptOssConfig(**SIZES, num_local_experts=12, num_experts_per_tok=3),
}
needs_fp4 = pytest.mark.skipif(not kernel_is_there(), reason="a processor without AVX512-BF16")
KEPT_BY_INT4 = "q_proj o_proj down_proj gate_up_proj"
CASES = [
    ("awq", "llama", KEPT_BY_INT4), ("gptq", "llama", KEPT_BY_INT4), ("gptq-act-order", "llama", KEPT_BY_INT4),
    ("compressed-int4", "llama", KEPT_BY_INT4), ("compressed-int4-zeros", "llama", KEPT_BY_INT4),
    ("nf4-nested", "llama", "q_proj o_proj gate_proj up_proj"),  # 96 columns are no blocks of 64
    ("awq", "mixture", KEPT_BY_INT4),
    ("gptq-act-order", "mixture", "q_proj o_proj down_proj"),  # gates' columns have an order of their own
    pytest.param("compressed-mxfp4", "llama", "q_proj o_proj gate_proj up_proj down_proj", marks=needs_fp4),
    pytest.param("mxfp4", "gpt-oss", "gate_up_proj down_proj", marks=needs_fp4),
]  # fmt: skip


def published(folder: Path, form: str, model: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(definitions, "GROUP", 32)
    save_folder(folder, make_model(MODELS[model]))
    if form == "mxfp4":
        publish_gpt_oss(folder)
    else:
        publish_bitsandbytes(folder, form) if form.startswith("nf4") else publish(folder, PUBLISHED[form])
    return folder


def kept_checkpoint(folder: Path, cache: Path, **options: object) -> Checkpoint:
    skeleton = skeleton_of(folder)
    return load_or_quantize(skeleton, read_checkpoint(folder), REPACKED, cache_folder=cache, device=CPU, **options)


def matrix_of(parameter: str) -> str:
    """The last part of a linear layer's name, or of the name of experts' parameter."""
    return parameter.removesuffix(".weight").rpartition(".")[2]


def packed_weights(skeleton: Skeleton) -> dict[str, PackedWeight]:
    modules = dict(skeleton.model.named_modules())
    return {name.removesuffix("_packed"): found for name, found in modules.items() if isinstance(found, PackedWeight)}


def unpacked(skeleton: Skeleton) -> dict[str, Tensor]:
    """All packed weights, as they are read from their files."""
    tensors = {name: stored for record in skeleton.records for name, stored in record.tensors.items()}
    store = LayerStore({piece.file for stored in tensors.values() for piece in stored.pieces})
    found = {}
    for name, weight in packed_weights(skeleton).items():
        parts = {
            part: torch.cat([store.view(piece).flatten() for piece in tensors[f"{name}_packed.{part}"].pieces])
            for part in weight.packing.stored_names(name)
        }
        shapes = weight.packing.part_shapes(weight.shape)
        parts = {part: tensor.view(shapes[part][0]) for part, tensor in parts.items()}
        found[name] = weight.packing.unpack(parts, torch.empty(weight.shape))
    return found


@pytest.mark.parametrize(("form", "model", "names"), CASES, ids=str)
def test_numbers_are_kept_where_a_kernel_takes_them_and_all_else_stays_in_its_file(
    form: str, model: str, names: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = published(tmp_path / "model", form, model, monkeypatch)
    source, skeleton = read_checkpoint(folder), skeleton_of(folder)
    own_format = skeleton.packed_formats[0]
    planned = quantized_checkpoint(skeleton_of(folder), source, REPACKED)
    made = kept_checkpoint(folder, tmp_path / "cache")
    assert {name: (entry.shape, entry.dtype) for name, entry in made.tensors.items()} == {
        name: (entry.shape, entry.dtype) for name, entry in planned.tensors.items()
    }
    stayed = {name: entry for name, entry in made.tensors.items() if entry.file.parent == folder}
    assert stayed == {name: source.tensors[name] for name in stayed}
    kept = skeleton_of(folder, checkpoint=made)
    formats = {matrix_of(name): weight.packing.name for name, weight in packed_weights(kept).items()}
    assert {name for name, found in formats.items() if found != own_format} == set(names.split()) & formats.keys()
    if model != "gpt-oss":  # of which the experts alone are packed
        assert {"k_proj": own_format, "v_proj": own_format}.items() <= formats.items()
    num_written = sum(2 + ("act-order" in form) for name, found in formats.items() if found != own_format)
    assert len(made.tensors) - len(stayed) == num_written * SIZES["num_hidden_layers"]
    # Scales and zero points are rounded to bf16; those of compressed-tensors are in bf16 as they are published.
    most = 0.0 if form == "compressed-int4" or "mxfp4" in form else 0.004
    weights, again = unpacked(skeleton_of(folder)), unpacked(kept)
    assert weights.keys() == again.keys()
    for name, weight in weights.items():
        is_kept = formats[matrix_of(name)] != own_format
        assert (again[name] - weight).norm() / weight.norm() <= most * is_kept, name
    found = found_logits(kept, resident=2)
    assert torch.equal(found_logits(kept, resident=0), found)
    if model != "llama":
        assert torch.equal(found_logits(kept, resident=0, on_demand=True), found)


def test_a_second_start_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = published(tmp_path / "model", "awq", "llama", monkeypatch)
    said: list[tuple[Path, int, int]] = []
    first, second = (
        kept_checkpoint(folder, tmp_path / "cache", announce=lambda *facts: said.append(facts)) for _ in range(2)
    )
    assert second.tensors == first.tensors
    ((own_folder, num_bytes, _),) = said
    made = [entry for entry in first.tensors.values() if entry.file.parent != folder]
    assert {entry.file.parent for entry in made} == {own_folder}
    assert num_bytes == sum(entry.num_bytes for entry in made)


def test_a_layer_may_have_nothing_to_keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = published(tmp_path / "model", "compressed-int4", "llama", monkeypatch)
    packed, plain = (load_file(found / "model.safetensors") for found in (folder, Path(f"{folder}-plain")))
    mixed = {name: part for name, part in packed.items() if ".layers.1." not in name}
    save(folder, mixed | {name: part for name, part in plain.items() if ".layers.1." in name}, None)
    expected = found_logits(skeleton_of(folder), resident=2)
    found = found_logits(skeleton_of(folder, checkpoint=kept_checkpoint(folder, tmp_path / "cache")), resident=0)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)  # activations have 15 bits


def test_another_kind_of_processor_makes_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = published(tmp_path / "model", "awq", "llama", monkeypatch)
    made = []
    for order in ORDERS:
        monkeypatch.setattr(int4, "INT4", Int4(order=order))
        monkeypatch.setattr(known, "LOSSLESS", (replace(INT4_LAYOUT, own=int4.INT4),))
        made.append(kept_checkpoint(folder, tmp_path / "cache"))
    files = [{entry.file for entry in checkpoint.tensors.values()} for checkpoint in made]
    assert all(path.exists() for path in set.union(*files))
    assert set.intersection(*files) == {folder / "model.safetensors"}
