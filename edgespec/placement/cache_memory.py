"""The memory of the keys and values of texts, in bytes, from a configuration alone."""

from __future__ import annotations

import torch
from transformers import PretrainedConfig

from edgespec.model.layer_kinds import COMPRESSED, attention_layers, index_numbers, indexed_layers, kinds_of
from edgespec.model.mechanisms.windows import key_sources
from edgespec.model.supported import understanding
from edgespec.tree.settings import TreeSettings
from offload.allocated import allocated_bytes


def cache_bytes(config: PretrainedConfig, *, rows: int, dtype: torch.dtype) -> int:
    """Return the bytes of the keys and values of `rows` rows in all layers that have some of their own."""
    return sum(_row_numbers(config)) * rows * dtype.itemsize


def placed_cache_bytes(
    config: PretrainedConfig, *, rows: int, num_texts: int, dtype: torch.dtype, device: torch.device
) -> int:
    """Return what a device's memory gives for the keys and values of so many texts, of `rows` rows in all."""
    if device.type != "cuda":
        return cache_bytes(config, rows=rows, dtype=dtype)
    text_bytes = -(-rows // num_texts) * dtype.itemsize
    return num_texts * sum(allocated_bytes(numbers * text_bytes) for numbers in _row_numbers(config))


def _row_numbers(config: PretrainedConfig) -> list[int]:
    """Return the numbers of a row in each tensor of keys, of values, or of an index's keys."""
    with understanding(config):
        sources = key_sources(config)
        own = [layer for layer in attention_layers(config) if sources[layer] == layer]
        rows = [num_kv_heads(config, layer) * dim for layer in own for dim in head_dims(config, layer)]
        kept = [index_numbers(config, layer) for layer in indexed_layers(config)]
        return rows + [part for width, block, size in kept for part in (width, -(-block // size))]


def num_kv_heads(whole: PretrainedConfig, layer: int) -> int:
    """Return how many heads' keys and values a layer keeps; latent attention keeps one row for all heads."""
    config = whole.per_layer_config[layer]
    if getattr(config, "kv_lora_rank", None):
        return 1
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        return 1  # the older Falcon models
    heads = int(
        getattr(config, "num_key_value_heads", None)
        or getattr(config, "num_kv_heads", None)
        or config.num_attention_heads
    )
    if config.model_type == "jetmoe":
        return heads * int(config.num_experts_per_tok)  # repeated for each expert of attention
    if config.model_type == "mimo_v2_flash" and config.layer_types[layer] == "sliding_attention":
        return 2 * heads
    return heads


def head_dims(whole: PretrainedConfig, layer: int) -> tuple[int, int]:
    """Return the width of a head's keys and of its values in a layer."""
    config = whole.per_layer_config[layer]
    if getattr(config, "kv_lora_rank", None):
        rotates = (getattr(whole, "no_rope_layers", None) or {layer: True})[layer]
        return config.qk_rope_head_dim if rotates else 0, config.kv_lora_rank
    head_dim = (
        getattr(config, "head_dim", None)
        or getattr(config, "kv_channels", None)
        or config.hidden_size // config.num_attention_heads
    )
    if kinds_of(whole)[layer] in COMPRESSED:  # whose keys are their values
        return head_dim, 0
    return head_dim, getattr(config, "v_head_dim", None) or head_dim


def cache_rows(context_tokens: int, tree: TreeSettings) -> tuple[int, int]:
    """Return the rows of the target's and of the draft's cache: the text, and the rows of a tree after it.

    The draft's cache is larger, because the draft expands nodes that the finished tree may drop again.
    """
    return context_tokens + tree.num_nodes + 1, context_tokens + tree.num_drafted
