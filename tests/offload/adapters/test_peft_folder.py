"""An adapter's files are read or refused by name, before any weight is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from offload.adapters.fit import fitted
from offload.adapters.peft_folder import read_peft_folder
from offload.checkpoint import Checkpoint, read_checkpoint
from offload.errors import OffloadError
from offload.skeleton import Skeleton, build_skeleton
from tests.support.adapters import PREFIX, save_adapter, write_adapter
from tests.support.damage import written
from tests.support.families import FAMILIES, make_model, save_folder

LAYER = "model.layers.0.self_attn"
Q = f"{LAYER}.q_proj"
PARTS = {f"{Q}.lora_A.weight": torch.ones(4, 32), f"{Q}.lora_B.weight": torch.ones(32, 4)}
FIELDS: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}

# What PEFT 0.21 writes for plain LoRA, all fields of it
WHOLE: dict[str, Any] = {
    "alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None, "auto_mapping": None,
    "base_model_name_or_path": "acme/base", "bias": "none", "corda_config": None, "ensure_weight_tying": False,
    "eva_config": None, "exclude_modules": None, "fan_in_fan_out": False, "inference_mode": True,
    "init_lora_weights": True, "kasa_config": None, "layer_replication": None, "layers_pattern": None,
    "layers_to_transform": None, "loftq_config": {}, "lora_alpha": 8, "lora_bias": False, "lora_dropout": 0.1,
    "lora_ga_config": None, "megatron_config": None, "megatron_core": "megatron.core", "modules_to_save": None,
    "monteclora_config": None, "peft_type": "LORA", "peft_version": "0.21.2", "qalora_group_size": 16, "r": 4,
    "rank_pattern": {}, "revision": None, "target_modules": ["q_proj"], "target_parameters": None,
    "task_type": "CAUSAL_LM", "trainable_token_indices": None, "use_bdlora": None, "use_dora": False,
    "use_qalora": False, "use_rslora": False, "velora_config": None,
}  # fmt: skip

# A field, and a word of the error that names it
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another kind": ({"peft_type": "IA3"}, "IA3"),
    "no kind": ({"peft_type": None}, "null"),
    "tokens that begin it": ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
    "tokens of their own": ({"trainable_token_indices": [5]}, "trainable_token_indices"),
    "fused experts": ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
    "layers again": ({"layer_replication": [[0, 2], [1, 3]]}, "layer_replication"),
    "QALoRA": ({"use_qalora": True}, "use_qalora"),
    "BD-LoRA": ({"use_bdlora": {"nblocks": 2}}, "use_bdlora"),
    "a router": ({"arrow_config": {"top_k": 1}}, "arrow_config"),
    "KaSA": ({"kasa_config": {"beta": 1}}, "kasa_config"),
    "VeLoRA": ({"velora_config": {"scale": 1}}, "velora_config"),
    "samples": ({"monteclora_config": {"rho": 1}}, "monteclora_config"),
    "a field of tomorrow": ({"use_tomorrow": 1}, "use_tomorrow"),
    "a rank of no number": ({"r": "four"}, "'four'"[1:-1]),
    "a rank of 0": ({"r": 0}, "r = 0"),
    "an alpha of no number": ({"lora_alpha": [1]}, "lora_alpha"),
    "an alpha that is infinite": ({"lora_alpha": float("inf")}, "lora_alpha"),
    "a flag of no truth": ({"use_rslora": "yes"}, "use_rslora"),
    "patterns of no names": ({"rank_pattern": [4]}, "rank_pattern"),
    "a pattern of no number": ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern['q_proj']"),
    "a pattern that is none": ({"rank_pattern": {"q_(proj": 4}}, "rank_pattern"),
    "biases of another kind": ({"bias": "some"}, "bias"),
    "another rank": ({"r": 8}, "ranks 4 and 4"),
    "a pattern's other rank": ({"rank_pattern": {"q_proj": 2}}, "says 2"),
    "magnitudes that are not there": ({"use_dora": True}, "use_dora = true"),
}


def without(*names: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in PARTS.items() if name not in names}


TENSORS: dict[str, tuple[dict[str, Tensor], str]] = {
    "none": ({}, "without any tensor"),
    "no B": (without(f"{Q}.lora_B.weight"), "no lora_B"),
    "no A": (without(f"{Q}.lora_A.weight"), "no lora_A"),
    "B of another rank": (PARTS | {f"{Q}.lora_B.weight": torch.ones(32, 3)}, "ranks 4 and 3"),
    "a convolution": (PARTS | {f"{Q}.lora_A.weight": torch.ones(4, 32, 1)}, "3 dimensions"),
    "a part of another name": (PARTS | {f"{Q}.lora_C.weight": torch.ones(4)}, "lora_C"),
    "whole numbers": (PARTS | {f"{Q}.lora_A.weight": torch.ones(4, 32, dtype=torch.int8)}, "int8"),
    "magnitudes that nobody stated": (PARTS | {f"{Q}.lora_magnitude_vector": torch.ones(32)}, "has magnitudes"),
    "a bias of another length": (PARTS | {f"{Q}.lora_B.bias": torch.ones(5)}, "shape [5]"),
    "both kinds": (PARTS | {f"{Q}.lora_embedding_A": torch.ones(4, 32)}, "as an embedding"),
}

FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (lambda folder: (folder / "adapter_config.json").unlink(), "no adapter_config.json"),
    "a config of no JSON": (written("adapter_config.json", "{"), "not readable JSON"),
    "a config that is a list": (written("adapter_config.json", "[]"), "not a JSON object"),
    "no tensors": (lambda folder: (folder / "adapter_model.safetensors").unlink(), "no adapter_model.safetensors"),
    "a pickle": (
        lambda folder: (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin") and None, "pickle"
    ),
    "tensors of no header": (written("adapter_model.safetensors", b"\0" * 4), "cannot hold its header"),
    "a pointer": (
        written("adapter_model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"),
        "LFS",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Skeleton]:
    model = make_model(FAMILIES["llama"]())
    checkpoint: Checkpoint = read_checkpoint(save_folder(tmp_path_factory.mktemp("base"), model))
    return model, build_skeleton(model.config, checkpoint, dtype=torch.float32)


def test_every_field_that_peft_writes_is_known(tmp_path: Path) -> None:
    adapter = read_peft_folder(save_adapter(tmp_path, WHOLE, PARTS))
    assert adapter.base == "acme/base"
    assert adapter.deltas[Q].scale == 2


@pytest.mark.parametrize("of", REFUSED)
def test_a_field_with_another_meaning_is_refused_by_its_name(of: str, tmp_path: Path) -> None:
    fields, word = REFUSED[of]
    with pytest.raises(OffloadError) as caught:
        read_peft_folder(save_adapter(tmp_path, FIELDS | fields, PARTS))
    assert caught.value.code == "E_ADAPTER"
    assert word in caught.value.what


@pytest.mark.parametrize("of", TENSORS)
def test_tensors_that_make_no_adapter_are_refused_by_name(of: str, tmp_path: Path) -> None:
    tensors, word = TENSORS[of]
    with pytest.raises(OffloadError, match=r".") as caught:
        read_peft_folder(save_adapter(tmp_path, FIELDS, tensors))
    assert word in caught.value.what


@pytest.mark.parametrize("of", FILES)
def test_files_that_are_none_are_refused_by_name(of: str, tmp_path: Path) -> None:
    damage, word = FILES[of]
    damage(save_adapter(tmp_path, FIELDS, PARTS))
    with pytest.raises(OffloadError) as caught:
        read_peft_folder(tmp_path)
    assert word in f"{caught.value.what} {caught.value.fix}"


@pytest.mark.parametrize("parts", [("lora_embedding_A", "lora_embedding_B"), ("weight",)])
def test_a_head_that_is_to_follow_its_table_is_refused(parts: tuple[str, ...], tmp_path: Path) -> None:
    fields = FIELDS | {"ensure_weight_tying": True}
    read_peft_folder(save_adapter(tmp_path, fields, PARTS))
    table = {f"model.embed_tokens.{part}": torch.ones(4, 4) for part in parts}
    with pytest.raises(OffloadError, match="ensure_weight_tying"):
        read_peft_folder(save_adapter(tmp_path, fields, PARTS | table))


def test_the_first_pattern_that_fits_counts(tmp_path: Path) -> None:
    """A whole name, its end after a dot, or an expression; a word's end alone fits nothing."""
    patterns = {"_proj": 100, "layers.0.self_attn.q_proj": 3, r"layers\.\d+\.self_attn\.(q|k)_proj": 5, "q_proj": 7}
    adapter = read_peft_folder(save_adapter(tmp_path, FIELDS | {"alpha_pattern": patterns}, PARTS))
    assert adapter.deltas[Q].scale == 3 / 4


# What fits no module of a model: tensors, and a word of the error
ELSEWHERE: dict[str, tuple[dict[str, Tensor], str]] = {
    "no such module": ({name.replace("q_proj", "qkv_proj"): one for name, one in PARTS.items()}, f"{LAYER}.qkv_proj"),
    "a layer too many": ({name.replace("layers.0", "layers.9"): one for name, one in PARTS.items()}, "layers.9"),
    "narrower rows": (PARTS | {f"{Q}.lora_A.weight": torch.ones(4, 16)}, "from 16 to 32"),
    "more rows": (PARTS | {f"{Q}.lora_B.weight": torch.ones(64, 4)}, "from 32 to 64"),
    "a norm": ({f"model.norm.{end}": one for end, one in zip(("lora_A.weight", "lora_B.weight"), PARTS.values(),
                                                             strict=True)}, "no linear layer"),
    "an embedding as a layer": ({f"model.embed_tokens.{end}": one for end, one in zip(
        ("lora_A.weight", "lora_B.weight"), PARTS.values(), strict=True)}, "model.embed_tokens"),
    "no such parameter": (PARTS | {f"{Q}.scale": torch.ones(32)}, f"{Q}"),
    "a norm of another size": (PARTS | {"model.norm.weight": torch.ones(31)}, "shape [31]"),
    "a table that was resized": (PARTS | {"model.embed_tokens.weight": torch.ones(300, 32)}, "resized"),
}  # fmt: skip


@pytest.mark.parametrize("of", ELSEWHERE)
def test_what_fits_no_module_is_refused_by_its_name(of: str, llama: tuple[nn.Module, Skeleton], tmp_path: Path) -> None:
    tensors, word = ELSEWHERE[of]
    adapter = read_peft_folder(save_adapter(tmp_path, FIELDS, tensors))
    with pytest.raises(OffloadError) as caught:
        fitted(adapter, "one", llama[1])
    assert caught.value.code == "E_ADAPTER"
    assert word in caught.value.what


def test_a_single_expert_of_joined_ones_is_refused_by_its_name(tmp_path: Path) -> None:
    """As adapters have them that were trained where each expert had layers of its own."""
    expert = "model.layers.0.mlp.experts.1.up_proj"
    model = make_model(FAMILIES["qwen3-moe"]())
    checkpoint = read_checkpoint(save_folder(tmp_path / "model", model))
    skeleton = build_skeleton(model.config, checkpoint, dtype=torch.float32)
    parts = {name.replace(Q, expert): one for name, one in PARTS.items()}
    adapter = read_peft_folder(save_adapter(tmp_path / "one", FIELDS, parts))
    with pytest.raises(OffloadError, match="experts have joined weights") as caught:
        fitted(adapter, "one", skeleton)
    assert expert in caught.value.what


def test_a_table_beside_its_adapter_counts_where_it_was_trained(
    llama: tuple[nn.Module, Skeleton], tmp_path: Path
) -> None:
    """PEFT stores the whole table beside an adapter of an embedding, and a head that is the same."""
    model, skeleton = llama
    folder = write_adapter(tmp_path / "one", model, ["embed_tokens"])
    tensors = {name.removeprefix(PREFIX): one for name, one in load_file(folder / "adapter_model.safetensors").items()}
    table = model.get_parameter("model.embed_tokens.weight").detach()
    fields = json.loads((folder / "adapter_config.json").read_text())
    for change, replaced in ((0.0, set()), (1.0, {"model.embed_tokens.weight"})):
        stored = {"model.embed_tokens.base_layer.weight": table + change, "lm_head.weight": table}
        save_adapter(folder, fields, tensors | stored)
        assert set(fitted(read_peft_folder(folder), "one", skeleton).replaced) == replaced
    save_adapter(folder, fields, tensors | {"model.embed_tokens.base_layer.weight": table + 1})
    both = fitted(read_peft_folder(folder), "one", skeleton).replaced
    assert set(both) == {"model.embed_tokens.weight", "lm_head.weight"}, "PEFT loads it into the one tensor of both"


def test_a_plan_counts_factors_in_float32(llama: tuple[nn.Module, Skeleton], tmp_path: Path) -> None:
    half = {name: tensor.half() for name, tensor in PARTS.items()} | {"model.norm.weight": torch.ones(32)}
    adapter = fitted(read_peft_folder(save_adapter(tmp_path, FIELDS, half)), "one", llama[1])
    assert adapter.num_bytes == 4 * (4 * 32 + 32 * 4) + 4 * 32
