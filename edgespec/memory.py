"""What a pair needs beside its decoder layers, in bytes, from shapes alone.

Estimates lean high: peak memory must stay within the limit that a user gave.
"""

from __future__ import annotations

import torch
from transformers import PretrainedConfig

from edgespec.config import TreeSettings
from offload.layer_store import LayerRecord
from offload.streamed_model import Skeleton

MIB = 1 << 20
LIBRARIES_BYTES = 160 * MIB  # model code, kernels and tokenizer that load with the first model
CUDA_CONTEXT_BYTES = 600 * MIB
NUM_LOGITS_COPIES = 4  # logits, their float32, probabilities, one temporary
FLOAT32_BYTES = 4


def resident_bytes(record: LayerRecord, *, device: torch.device) -> int:
    """Bytes of a record that is loaded whole: as stored where nothing is converted or moved."""
    return record.flat_bytes if record.is_converted or device.type == "cuda" else record.stored_bytes


def cache_bytes(config: PretrainedConfig, *, rows: int, dtype: torch.dtype) -> int:
    """Keys and values of `rows` rows in all layers."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return int(2 * config.num_hidden_layers * kv_heads * head_dim * rows * dtype.itemsize)


def pass_bytes(config: PretrainedConfig, *, rows: int, logits_rows: int, keys: int, dtype: torch.dtype) -> int:
    """The largest temporaries of one forward: feed-forward, attention mask, logits and what verification makes."""
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    activations = rows * (3 * inner + 8 * config.hidden_size) * max(dtype.itemsize, FLOAT32_BYTES)
    masks = rows * keys * (2 * dtype.itemsize + 3)
    logits = logits_rows * config.vocab_size * FLOAT32_BYTES * NUM_LOGITS_COPIES
    return int(activations + masks + logits)


def fixed_bytes(
    target: Skeleton,
    draft: Skeleton | None,
    *,
    tree: TreeSettings,
    context_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, int]:
    """Everything but the target's decoder layers: what -> bytes."""
    config = target.model.config.get_text_config(decoder=True)
    tree_rows = 1 if draft is None else tree.size + 1
    rows, longest = context_tokens + tree_rows, max(context_tokens, tree_rows)
    uses = {
        "libraries": CUDA_CONTEXT_BYTES if device.type == "cuda" else LIBRARIES_BYTES,
        "embeddings, norms, head": resident_bytes(target.outside, device=device),
        "target cache": cache_bytes(config, rows=rows, dtype=dtype),
        "target pass": pass_bytes(config, rows=longest, logits_rows=tree_rows, keys=rows, dtype=dtype),
    }
    if draft is not None:
        draft_config = draft.model.config.get_text_config(decoder=True)
        draft_rows = context_tokens + 2 * tree_rows
        uses["draft"] = sum(resident_bytes(r, device=device) for r in (draft.outside, *draft.records))
        uses["draft cache"] = cache_bytes(draft_config, rows=draft_rows, dtype=dtype)
        uses["draft pass"] = pass_bytes(draft_config, rows=longest, logits_rows=tree_rows, keys=draft_rows, dtype=dtype)
    return uses
