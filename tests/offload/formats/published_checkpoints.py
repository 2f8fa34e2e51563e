"""Checkpoints in the published formats (`definitions.py`), and plain ones of the weights that they mean."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from tests.offload.formats.definitions import Parts, Published, mxfp4_meaning, mxfp4_parts
from tests.support.families import VOCAB

# All of its matrices have whole blocks of 64 rows and columns, as kernels take them.
WHOLE_BLOCKS = LlamaConfig(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
    num_key_value_heads=4, max_position_embeddings=256, bos_token_id=None, eos_token_id=256, pad_token_id=256,
)  # fmt: skip


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
