"""The layers of a configuration: those that keep keys and values, and those that keep a recurrent state.

A state can be followed through a tree if we know the functions that make it (`recurrent.py`), or if all of it goes
through transformers' cache (`by_depth.py`).
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from transformers import PretrainedConfig

INDEXED = "indexed_attention"
SPARSE_BLOCKS = "minimax_m3_sparse"
COMPRESSED_SPARSE = "compressed_sparse_attention"
COMPRESSED = {COMPRESSED_SPARSE, "heavily_compressed_attention"}
ATTENTION = {"full_attention", "sliding_attention", "chunked_attention", INDEXED, SPARSE_BLOCKS, *COMPRESSED}
RECURRENT = {"linear_attention", "conv"}
BOTH = {"hybrid", "hybrid_sliding"}
NEITHER = {"mlp", "moe"}
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")  # families' names
LAYER_COUNTS = (  # where a family has them
    "num_hidden_layers", "encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers", "num_blocks",
)  # fmt: skip
CHOSEN_COUNTS = ("num_experts_per_tok", "top_k_experts")

# Functions in transformers' modules: those that we replace, and those that rule a module out
CONVOLUTION = "causal_conv1d_fn"
SCANS = {"torch_chunk_gated_delta_rule", "mamba2_chunk_scan"}
OTHER_SCANS = {"mamba_selective_scan", "chunk_kimi_delta_attention"}
# Classes of indexes that choose blocks of places (`edgespec.model.mechanisms.block_index`)
BLOCK_INDEXES = ("Qwen4ExpTextQSAIndexer", "MiniMaxM3VLIndexer", "Glm5NextTextIndexer")
# Classes that compress rows to keys (`edgespec.model.mechanisms.compressed_keys`)
COMPRESSORS = ("DeepseekV4CSACompressor", "DeepseekV4HCACompressor")
STATE_CALLS = {"update_conv_state", "update_recurrent_state"}  # of a cache


def kinds_of(config: PretrainedConfig) -> list[str]:
    """Return each layer's kind, as transformers names it."""
    kinds = getattr(config, "layer_types", None)
    return list(kinds) if kinds else ["full_attention"] * int(getattr(config, "num_hidden_layers", 0))


def has_recurrent_layers(config: PretrainedConfig) -> bool:
    """Return whether some layers keep a state."""
    return not (RECURRENT | BOTH).isdisjoint(kinds_of(config))


def attention_layers(config: PretrainedConfig) -> list[int]:
    """Return the layers that keep keys and values: all but the kinds that are known to keep none."""
    return [layer for layer, kind in enumerate(kinds_of(config)) if kind not in RECURRENT | NEITHER]


def indexed_layers(config: PretrainedConfig) -> list[int]:
    """Return the layers that keep what an index of their own, or their groups, are made of.

    Others may share what the index of an earlier one chose.
    """
    modes = getattr(config, "indexer_types", None) or ["full"] * len(kinds_of(config))
    pairs = zip(kinds_of(config), modes, strict=True)
    kept = {INDEXED, SPARSE_BLOCKS, *COMPRESSED}
    return [layer for layer, (kind, mode) in enumerate(pairs) if kind in kept and mode == "full"]


def chooses_known_blocks(config: PretrainedConfig) -> bool:
    """Return whether the family's index of blocks is one that we know."""
    return not set(BLOCK_INDEXES).isdisjoint(_names(config))


def compresses_as_known(config: PretrainedConfig) -> bool:
    """Return whether the family compresses rows to keys in a way that we know."""
    return not set(COMPRESSORS).isdisjoint(_names(config))


def index_numbers(config: PretrainedConfig, layer: int) -> tuple[int, int, int]:
    """Return what a layer's index keeps: the numbers of a row, those of a block, and a block's rows; else 0 and 1.

    A layer that compresses rows to keys keeps the like of its groups; with an index, each row gives to two of them.
    """
    kind = kinds_of(config)[layer]
    if kind in COMPRESSED:
        width = config.head_dim + (config.index_head_dim if kind == COMPRESSED_SPARSE else 0)
        return (4 if kind == COMPRESSED_SPARSE else 2) * width, width, config.compress_rates[kind]
    qwen4_width, width = getattr(config, "indexer_head_dim", None), getattr(config, "index_head_dim", None) or 0
    if qwen4_width:
        return qwen4_width, qwen4_width, config.indexer_compress_ratio
    if getattr(config, "index_kpool", None):
        return 2 * width, width, config.index_kpool  # keys, and the gates of their shares in a block
    return width, 0, 1


def unknown_recurrent(config: PretrainedConfig) -> str | None:
    """Return the recurrent layers that cannot read a tree, in words; None where all can."""
    if not has_recurrent_layers(config):
        return None
    if getattr(config, "num_mem_blocks", None):  # Zamba's: their caches are the layers' own all the same
        return "layers that share one block of attention"
    return None if _has_known_functions(config) or reads_by_levels(config) else "recurrent layers of a kind of its own"


def reads_by_levels(config: PretrainedConfig) -> bool:
    """Return whether recurrent layers are read level by level: we know where their states are, not how they change."""
    if not has_recurrent_layers(config) or _has_known_functions(config):
        return False
    return any(keeps_state(kind) for kind in _names(config).values() if isinstance(kind, type))


def keeps_state(kind: type) -> bool:
    """Return whether modules of this class keep a state in transformers' cache, and no keys and values beside it."""
    forward = inspect.unwrap(getattr(kind, "forward", None) or _nothing)
    calls = set(getattr(getattr(forward, "__code__", None), "co_names", ()))
    return not STATE_CALLS.isdisjoint(calls) and "update" not in calls


def _nothing() -> None: ...


def _has_known_functions(config: PretrainedConfig) -> bool:
    names = _names(config)
    needs_scan = "conv" not in kinds_of(config)
    return CONVOLUTION in names and OTHER_SCANS.isdisjoint(names) and not (needs_scan and SCANS.isdisjoint(names))


def _names(config: PretrainedConfig) -> dict[str, Any]:
    """Return the names in the family's module."""
    return vars(importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_")))


def num_chosen(config: PretrainedConfig) -> int:
    """Return the number of experts that a layer chooses for a token; 0 without experts."""
    if not any(getattr(config, key, None) for key in EXPERT_COUNTS):
        return 0
    return next((int(count) for key in CHOSEN_COUNTS if (count := getattr(config, key, None))), 1)


def chosen_experts(config: PretrainedConfig) -> tuple[int | None, float]:
    """Return the number of a layer's experts, None without any, and the share that it chooses for a token."""
    num_experts = next((int(count) for key in EXPERT_COUNTS if (count := getattr(config, key, None))), None)
    return num_experts, num_chosen(config) / num_experts if num_experts else 1.0


def layer_overrides(config: PretrainedConfig) -> dict[int, dict[str, Any]]:
    """Return the values of single layers that replace the configuration's own: layer -> name -> value."""
    return dict(config._heterogeneity_spec.per_layer_overrides) if config.is_heterogeneous else {}


def keep_layers(config: PretrainedConfig, layers: Sequence[int]) -> None:
    """Reduce a text part to these layers, with their own values."""
    text: Any = config
    overrides, num_layers = layer_overrides(text), text.num_hidden_layers
    num_shared = getattr(text, "num_kv_shared_layers", None) or 0
    sources = getattr(text, "kv_source_layers", None)
    ngram_layers = getattr(text, "ple_layer_ids", None)
    if ngram_layers:  # counted from 1
        text.ple_layer_ids = [place + 1 for place, layer in enumerate(layers) if layer + 1 in ngram_layers]
    text.per_layer_config = None
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == num_layers and name not in ("architectures", "ple_layer_ids"):
            setattr(text, name, [value[layer] for layer in layers])
    for name in LAYER_COUNTS:
        if getattr(text, name, None):
            with suppress(NotImplementedError):  # ProphetNet's first one stands for another
                setattr(text, name, len(layers))
    if sources:
        places = {layer: place for place, layer in enumerate(layers)}
        text.kv_source_layers = [places.get(sources[layer], places[layer]) for layer in layers]
    if num_shared:
        text.num_kv_shared_layers = sum(layer >= num_layers - num_shared for layer in layers)
    text.per_layer_config = {
        index: overrides[layer] for index, layer in enumerate(layers) if layer in overrides
    } or None
