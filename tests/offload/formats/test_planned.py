"""What config.json states decides which weights are packed, and as what, where the files are not there."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GptOssConfig

from offload.architecture import architecture_checkpoint
from offload.errors import CheckpointError
from offload.formats.planned import planned_parts
from tests.offload.formats.definitions import FP8_BLOCKS, PUBLISHED, WEIGHTS, compressed

FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
GATE, GATE_PROJECTION = "model.layers.3.mlp.gate.weight", "model.layers.3.mlp.gate_proj.weight"


def test_gpt_oss_120b_has_the_bytes_that_are_published() -> None:
    """The number is `total_size` of its index on the Hub."""
    plain = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config = GptOssConfig(
        dtype="bfloat16",
        tie_word_embeddings=False,
        quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": plain},
    )
    tensors = architecture_checkpoint(config, Path("gpt-oss-120b")).tensors
    assert sum(entry.num_bytes for entry in tensors.values()) == 65_248_815_744


@pytest.mark.parametrize(
    "plain",
    [
        {"modules_to_not_convert": ["model.layers.3.mlp.gate"]},
        {"modules_to_not_convert": ["mlp.gate"]},
        {"ignore": ["lm_head", "re:.*mlp.gate$"]},
        {"exclude_modules": ["model.layers.3.mlp.gate*"], "excepted": [GATE_PROJECTION]},
        {"llm_int8_skip_modules": ["gate"]},
        {"dynamic": {"-:.*mlp.gate$": {}}},
    ],
    ids=str,
)
def test_weights_that_are_named_as_plain_stay_plain_and_no_others(plain: dict[str, Any]) -> None:
    stated = {**FP8_BLOCKS, **plain}
    assert planned_parts(GATE, (64, 64), stated) == {}
    others = {GATE_PROJECTION} - set(plain.get("excepted", ()))
    assert all(planned_parts(name, (64, 64), stated) for name in others)


def test_groups_of_modules_have_their_own_format() -> None:
    stated = compressed("mixed-precision", {})
    stated["config_groups"] = {
        "experts": {"targets": ["re:.*mlp.*"], "weights": WEIGHTS, "format": "pack-quantized"},
        "others": {"targets": ["Linear"], "weights": FLOAT8, "format": "float-quantized"},
    }
    numbers, _ = planned_parts("model.layers.0.self_attn.q_proj.weight", (64, 32), stated).values()
    words, _ = planned_parts("model.layers.0.mlp.up_proj.weight", (64, 32), stated).values()
    assert (numbers, words) == (((64, 32), torch.float8_e4m3fn), ((64, 4), torch.int32))


def test_a_module_that_no_group_names_stays_plain() -> None:
    stated = compressed("pack-quantized", WEIGHTS)
    stated["config_groups"]["group_0"]["targets"] = ["re:.*experts.*"]
    assert planned_parts("model.layers.0.self_attn.q_proj.weight", (64, 32), stated) == {}


@pytest.mark.parametrize("is_nested", [False, True])
def test_bitsandbytes_packs_linear_layers_and_leaves_experts(is_nested: bool) -> None:
    stated = {**BITSANDBYTES, "bnb_4bit_use_double_quant": is_nested}
    parts = planned_parts("model.layers.0.mlp.up_proj.weight", (256, 256), stated)
    assert parts["model.layers.0.mlp.up_proj.weight"][0] == (256 * 256 // 2, 1)
    assert ("model.layers.0.mlp.up_proj.weight.nested_absmax" in parts) == is_nested
    assert planned_parts("model.layers.0.mlp.experts.up_proj", (4, 256, 256), stated) == {}


def test_experts_in_one_parameter_have_their_parts_in_front() -> None:
    parts = planned_parts("model.layers.0.mlp.experts.down_proj", (4, 64, 32), PUBLISHED["fbgemm-fp8"].stated)
    assert parts == {
        "model.layers.0.mlp.experts.down_proj": ((4, 64, 32), torch.float8_e4m3fn),
        "model.layers.0.mlp.experts.down_proj.weight_scale": ((4, 64, 1), torch.float32),
    }


@pytest.mark.parametrize(
    "stated",
    [
        compressed("mixed-precision", {**WEIGHTS, "num_bits": 4}),
        {"quant_method": "modelopt", "quant_algo": "W4A8"},
        {"quant_method": "fp8", "weight_block_size": [128]},
        {"quant_method": "fp8", "weight_block_size": {"rows": 128}},
        {"quant_method": "gptq", "bits": 0},
        {**FP8_BLOCKS, "ignore": ["re:("]},
    ],
    ids=str,
)
def test_a_config_that_does_not_say_the_sizes_is_refused_with_a_way_out(stated: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="does not say how large the packed weights are") as caught:
        planned_parts(GATE_PROJECTION, (64, 64), stated)
    assert caught.value.code == "E_QUANTIZED"
