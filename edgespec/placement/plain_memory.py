"""The memory of texts that are decoded plainly: transformers' own cache, which is measured, and whole prompts."""

from __future__ import annotations

import copy

import torch
from torch import nn
from transformers import PreTrainedModel

from edgespec.model.pass_rows import next_rows
from edgespec.model.plain_model import PlainModel
from edgespec.model.self_check import random_model_and_text, trial_of
from edgespec.placement.memory import always_uses
from edgespec.placement.run_config import RunConfig
from offload.layer_store import LayerRecord
from offload.skeleton import Skeleton

FLOAT32_BYTES = 4
ROWS = (8, 16)  # that are read to measure a cache
NUM_HIDDEN_COPIES = 4  # of a prompt's hidden states: before and after a layer, and positions
SLACK = 1.5  # an allocator keeps freed blocks that fit nothing that comes next
HEAD_COUNTS = ("num_attention_heads", "n_head", "num_heads", "decoder_attention_heads")
INNER_WIDTHS = ("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "ffn_hidden_size")


def plain_device_uses(
    target: Skeleton, run_config: RunConfig, *, table: LayerRecord | None, on_demand: bool
) -> dict[str, int]:
    """Return the bytes of each use of the device, all but the target's decoder layers, as `device_uses` does."""
    uses = always_uses(target, None, table, run_config.device) | plain_uses(target.model, run_config)
    unpacking = {
        "weights while unpacked": target.unpack_bytes(run_config.dtype, run_config.device, on_demand=on_demand)
    }
    return uses | {use: num_bytes for use, num_bytes in unpacking.items() if num_bytes}


def plain_uses(model: PreTrainedModel, run_config: RunConfig) -> dict[str, int]:
    """Return the bytes of the caches of all texts, and of the temporaries of a pass that reads their prompts whole."""
    config = model.config.get_text_config(decoder=True)
    fixed_bytes, row_bytes = cache_sizes(model, run_config.dtype)
    caches_bytes = run_config.num_texts * fixed_bytes + run_config.all_tokens * row_bytes
    # Rows that are added to a layer's keys make a new tensor, while the old one is still there.
    caches_bytes += int(SLACK * caches_bytes / max(1, config.num_hidden_layers))
    rows, item = run_config.prompt_tokens, run_config.dtype.itemsize
    heads = _first(config, HEAD_COUNTS) or 1
    inner = _first(config, INNER_WIDTHS) or 4 * config.hidden_size
    layer_bytes = rows * ((3 * inner + 8 * config.hidden_size) * item + 2 * config.hidden_size * FLOAT32_BYTES)
    layer_bytes += rows * rows * heads * (2 * item + FLOAT32_BYTES)
    held_bytes = run_config.num_texts * rows * (NUM_HIDDEN_COPIES * config.hidden_size * item + rows * FLOAT32_BYTES)
    logits_bytes = run_config.num_texts * config.vocab_size * FLOAT32_BYTES
    return {
        "target: its own cache": caches_bytes,
        "target: one pass": int(SLACK * (layer_bytes + held_bytes + logits_bytes)),
    }


@torch.no_grad()
def cache_sizes(model: PreTrainedModel, dtype: torch.dtype) -> tuple[int, int]:
    """Return the bytes of a text's cache without rows, and those of each row; a window is counted as if it had no end.

    The model itself is asked, without numbers; where its code looks at numbers, a narrow copy, whose sizes are scaled.
    """
    try:
        bare = copy.deepcopy(model)
        nn.Module.to(bare, "meta", dtype)
        return _measured(bare, torch.device("meta"))
    except Exception:  # a family's code may raise anything where tensors have no numbers
        narrow, _ = random_model_and_text(trial_of(model.config, device=torch.device("cpu")))
        nn.Module.to(narrow, dtype)
        fixed_bytes, row_bytes = _measured(narrow, torch.device("cpu"))
        ours, theirs = (of.config.get_text_config(decoder=True) for of in (model, narrow))
        width = -(-ours.hidden_size // theirs.hidden_size)
        layers = -(-ours.num_hidden_layers // theirs.num_hidden_layers)
        return fixed_bytes * layers * width * width, row_bytes * layers * width


def _measured(model: PreTrainedModel, device: torch.device) -> tuple[int, int]:
    plain = PlainModel(model, device=device, reads_on=False)
    sizes = []
    for rows in ROWS:
        text = plain.new_text()
        plain.read([next_rows(text, torch.zeros(rows, dtype=torch.long, device=device))])
        sizes.append(text.num_bytes)
    plain.close()
    row_bytes = -(-(sizes[1] - sizes[0]) // (ROWS[1] - ROWS[0]))
    return max(0, sizes[0] - ROWS[0] * row_bytes), row_bytes


def _first(config: object, names: tuple[str, ...]) -> int:
    return next((int(value) for name in names if isinstance(value := getattr(config, name, None), int)), 0)
