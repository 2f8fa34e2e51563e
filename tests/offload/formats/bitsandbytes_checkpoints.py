"""What bitsandbytes' own functions make of weights, and what those mean by definition."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from offload.formats.bitsandbytes_4bit import bitsandbytes_functional


def looked_up(packed: Tensor, scales: Tensor, shape: tuple[int, ...], kind: str) -> Tensor:
    """A 4-bit weight by definition: high half first, code times the block's scale."""
    code = bitsandbytes_functional().get_4bit_type(kind, device="cpu")
    halves = torch.stack([packed.view(-1) >> 4, packed.view(-1) & 15], dim=1).view(-1).int()
    return (code[halves].view(scales.shape[0], -1) * scales[:, None]).view(shape)


def block_scales(state: Any) -> Tensor:
    if state.state2 is None:
        return state.absmax
    return bitsandbytes_functional().dequantize_blockwise(state.absmax, state.state2) + state.offset


def published(folder: Path, kind: str) -> Path:
    """The folder's checkpoint as bitsandbytes publishes a quantised one: every linear layer but the head."""
    functional = bitsandbytes_functional()
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        weight = tensors[name]
        if kind == "int8":
            packed, scale, _ = functional.int8_vectorwise_quant(weight.half())
            tensors |= {
                name: packed,
                name.replace("weight", "SCB"): scale,
                name.replace("weight", "weight_format"): torch.tensor(0, dtype=torch.uint8),
            }
        else:
            nested = kind.endswith("nested")
            packed, state = functional.quantize_4bit(
                weight, compress_statistics=nested, quant_type=kind[:3], blocksize=64
            )
            tensors[name] = packed
            tensors |= {f"{name}.{key}": value.contiguous() for key, value in state.as_dict(packed=True).items()}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": kind != "int8",
        "load_in_8bit": kind == "int8",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
