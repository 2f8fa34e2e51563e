"""The bytes that a layer's forward takes of each row, and of each row and key: estimates that lean high."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from edgespec.model.layer_kinds import num_chosen
from edgespec.model.mechanisms.known import attention_layers, key_shape
from edgespec.model.supported import understanding

FLOAT32_BYTES, FLOAT64_BYTES = 4, 8
PASS_SLACK = 1.5  # an allocator keeps freed blocks that fit nothing that comes next


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSizes:
    """The bytes that a layer's forward takes."""

    row_bytes: int  # of a row
    mask_bytes: int  # of a row and a key: what all layers share
    pair_bytes: int  # of a row and a key in one layer

    def of_rows(self, rows: int, keys: int) -> int:
        """Return the bytes of so many rows that see so many keys."""
        return int(PASS_SLACK * rows * (self.row_bytes + keys * self.pair_bytes))


def pass_sizes(config: PretrainedConfig, dtype: torch.dtype) -> PassSizes:
    """Return the bytes of the widest of a model's layers."""
    with understanding(config):
        inner = max(_inner_size(of, layer) for layer, of in enumerate(config.per_layer_config))
        attending = [(layer, config.per_layer_config[layer]) for layer in attention_layers(config)]
        heads = max((of.num_attention_heads for _, of in attending), default=0)
        groups = max((of.num_attention_heads // key_shape(config, layer).heads for layer, of in attending), default=0)
    return PassSizes(
        # Norms compute in float32, the rest in the layers' own dtype. Experts' inputs and outputs exist for all chosen.
        row_bytes=num_chosen(config) * config.hidden_size * (dtype.itemsize + FLOAT32_BYTES)
        + (3 * inner + 6 * config.hidden_size) * dtype.itemsize
        + 2 * config.hidden_size * FLOAT32_BYTES,
        mask_bytes=2 * dtype.itemsize + 3,  # with a window and without
        # The mask is repeated for the heads of a group; capped scores exist for all heads.
        pair_bytes=groups * dtype.itemsize
        + (heads * (2 * dtype.itemsize + FLOAT32_BYTES) if has_scores(config) else 0),
    )


def has_scores(config: PretrainedConfig) -> bool:
    """Return whether attention computes its scores one by one: capped ones, and those beside sinks."""
    return bool(getattr(config, "attn_logit_softcapping", None) or config.model_type == "gpt_oss")


def _inner_size(config: PretrainedConfig, layer: int) -> int:
    """Return the width inside a layer's network; some families state it for each layer."""
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    inner = inner[layer] if isinstance(inner, list | tuple) else inner
    is_wide = getattr(config, "use_double_wide_mlp", False)  # Gemma 4's layers that share keys
    return int(2 * inner if is_wide else inner)
