"""Checkpoints in the published formats, and plain ones of the weights that they mean."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

from tests.conftest import VOCAB
from tests.offload.formats.definitions import (
    BLOCK,
    GROUP,
    Parts,
    awq_meaning,
    awq_parts,
    blocks_meaning,
    blocks_of,
    fp8_parts,
    gptq_meaning,
    gptq_parts,
    int8_parts,
    matrix_meaning,
    modelopt_meaning,
    modelopt_parts,
    mxfp4_meaning,
    mxfp4_parts,
    mxfp8_meaning,
    mxfp8_parts,
    nvfp4_meaning,
    nvfp4_parts,
    packed_meaning,
    packed_parts,
    rows_meaning,
)

# All of its matrices have whole blocks of 64 rows and columns, as kernels take them.
WHOLE_BLOCKS = LlamaConfig(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
    num_key_value_heads=4, max_position_embeddings=256, bos_token_id=None, eos_token_id=256, pad_token_id=256,
)  # fmt: skip
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}


@dataclass(frozen=True, kw_only=True)
class Published:
    """A way of publishing: what config.json states, random parts of a matrix, and what they mean."""

    stated: dict[str, Any]
    parts: Callable[[int, int], Parts]
    meaning: Callable[[Parts, int, int], Tensor]
    name: str


def compressed(form: str, weights: dict[str, Any], activations: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


FP8_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
ACTIVATIONS = {"num_bits": 8, "type": "float", "dynamic": True}
PUBLISHED: dict[str, Published] = {
    "fp8-blocks": Published(
        name="fp8", stated=FP8_BLOCKS, parts=fp8_parts("weight_scale_inv", blocks_of), meaning=blocks_meaning
    ),
    "fp8-matrix": Published(
        name="fp8",
        stated={"quant_method": "fp8", "activation_scheme": "static"},
        parts=fp8_parts("weight_scale_inv", lambda _rows, _columns: ()),
        meaning=matrix_meaning,
    ),
    "compressed-fp8-rows": Published(
        name="fp8",
        stated=compressed("float-quantized", FLOAT8, ACTIVATIONS),
        parts=fp8_parts("weight_scale", lambda rows, _columns: (rows, 1)),
        meaning=rows_meaning,
    ),
    "compressed-fp8-blocks": Published(
        name="fp8",
        stated=compressed("float-quantized", {**FLOAT8, "block_structure": list(BLOCK)}, ACTIVATIONS),
        parts=fp8_parts("weight_scale", blocks_of),
        meaning=blocks_meaning,
    ),
    "fbgemm-fp8": Published(
        name="fp8",
        stated={"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        parts=fp8_parts("weight_scale", lambda rows, _columns: (rows, 1)),
        meaning=rows_meaning,
    ),
    "compressed-mxfp8": Published(
        name="fp8",
        stated=compressed("mxfp8-quantized", {**FLOAT8, "strategy": "group", "group_size": 32}, ACTIVATIONS),
        parts=mxfp8_parts,
        meaning=mxfp8_meaning,
    ),
    "compressed-int8": Published(
        name="int-quantized",
        stated=compressed("int-quantized", {**FLOAT8, "type": "int"}, ACTIVATIONS),
        parts=int8_parts,
        meaning=rows_meaning,
    ),
    "compressed-int4": Published(
        name="pack-quantized",
        stated=compressed("pack-quantized", WEIGHTS),
        parts=packed_parts(4, zeros=False),
        meaning=packed_meaning(4, zeros=False),
    ),
    "compressed-int4-zeros": Published(
        name="pack-quantized",
        stated=compressed("pack-quantized", {**WEIGHTS, "symmetric": False}),
        parts=packed_parts(4, zeros=True),
        meaning=packed_meaning(4, zeros=True),
    ),
    "compressed-packed-int8": Published(
        name="pack-quantized",
        stated=compressed("pack-quantized", {**WEIGHTS, "num_bits": 8}),
        parts=packed_parts(8, zeros=False),
        meaning=packed_meaning(8, zeros=False),
    ),
    "compressed-nvfp4": Published(
        name="nvfp4",
        stated=compressed("nvfp4-pack-quantized", {**WEIGHTS, "type": "float", "group_size": 16}, ACTIVATIONS),
        parts=nvfp4_parts,
        meaning=nvfp4_meaning,
    ),
    "modelopt-nvfp4": Published(
        name="nvfp4",
        stated={"quant_method": "modelopt", "quant_algo": "NVFP4"},
        parts=modelopt_parts,
        meaning=modelopt_meaning,
    ),
    "compressed-mxfp4": Published(
        name="mxfp4",
        stated=compressed("mxfp4-pack-quantized", {**WEIGHTS, "type": "float", "group_size": 32}),
        parts=mxfp4_parts,
        meaning=mxfp4_meaning,
    ),
    "gptq": Published(
        name="gptq",
        stated={"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False},
        parts=gptq_parts(),
        meaning=gptq_meaning(),
    ),
    "gptq-act-order": Published(
        name="gptq",
        stated={"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "checkpoint_format": "gptq"},
        parts=gptq_parts(act_order=True),
        meaning=gptq_meaning(),
    ),
    "gptq-v2": Published(
        name="gptq",
        stated={"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": "gptq_v2"},
        parts=gptq_parts(),
        meaning=gptq_meaning(less=0),
    ),
    "gptq-8-bits": Published(
        name="gptq",
        stated={"quant_method": "gptq", "bits": 8, "group_size": GROUP, "desc_act": False},
        parts=gptq_parts(bits=8),
        meaning=gptq_meaning(bits=8),
    ),
    "awq": Published(
        name="awq",
        stated={"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
        parts=awq_parts,
        meaning=awq_meaning,
    ),
}


def publish(folder: Path, published: Published) -> Path:
    """Write the folder's checkpoint in a format, every projection but the head, and return where the plain one is."""
    plain = Path(f"{folder}-plain")
    shutil.copytree(folder, plain)
    tensors = load_file(folder / "model.safetensors")
    dequantized = dict(tensors)
    for name in [name for name in tensors if name.endswith(("proj.weight", "w1.weight", "w2.weight", "w3.weight"))]:
        rows, columns = tensors.pop(name).shape
        parts = published.parts(rows, columns)
        tensors |= {name.removesuffix("weight") + leaf: part.contiguous() for leaf, part in parts.items()}
        dequantized[name] = published.meaning(parts, rows, columns)
    save(folder, tensors, published.stated)
    save(plain, dequantized, None)
    return plain


def publish_gpt_oss(folder: Path) -> Path:
    """Write gpt-oss' checkpoint as it is published: the experts as blocks, [experts, outputs, groups, 16 bytes]."""
    plain = Path(f"{folder}-plain")
    shutil.copytree(folder, plain)
    tensors = load_file(folder / "model.safetensors")
    dequantized = dict(tensors)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        made = [mxfp4_parts(rows, columns) for _ in range(experts)]
        blocks = torch.stack([parts["weight_packed"] for parts in made])
        tensors[f"{name}_blocks"] = blocks.view(experts, rows, columns // 32, 16)
        tensors[f"{name}_scales"] = torch.stack([parts["weight_scale"] for parts in made])
        dequantized[name] = torch.stack([mxfp4_meaning(parts, rows, columns).T for parts in made]).contiguous()
    save(folder, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    save(plain, dequantized, None)
    return plain


def save(folder: Path, tensors: Parts, stated: dict[str, Any] | None) -> None:
    """Write the tensors, and into config.json what is stated of them, if anything."""
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    if stated is not None:
        config["quantization_config"] = stated
    (folder / "config.json").write_text(json.dumps(config))
