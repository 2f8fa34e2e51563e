"""What kinds of layers a configuration has: which keep keys and values, and which a recurrent state.

A state can be followed through a tree where we know the functions that make it (`edgespec.model.recurrent`), or where
all of it goes through transformers' cache (`edgespec.model.recurrent_levels`).
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from transformers import PretrainedConfig

ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
RECURRENT = {"linear_attention", "conv"}
BOTH = {"hybrid", "hybrid_sliding"}
NEITHER = {"mlp", "moe"}
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")  # what families call it
CHOSEN_COUNTS = ("num_experts_per_tok", "top_k_experts")

# Functions of transformers' modules: those that we know, and those of layers beside them that we do not know.
CONVOLUTION = "causal_conv1d_fn"
SCANS = {"torch_chunk_gated_delta_rule", "mamba2_chunk_scan"}
OTHER_SCANS = {"mamba_selective_scan", "chunk_kimi_delta_attention"}
STATE_CALLS = {"update_conv_state", "update_recurrent_state"}  # of a cache


def kinds_of(config: PretrainedConfig) -> list[str]:
    """Return each layer's kind, as transformers names it."""
    kinds = getattr(config, "layer_types", None)
    return list(kinds) if kinds else ["full_attention"] * int(getattr(config, "num_hidden_layers", 0))


def has_recurrent_layers(config: PretrainedConfig) -> bool:
    """Return whether some layers keep a state."""
    return not (RECURRENT | BOTH).isdisjoint(kinds_of(config))


def attention_layers(config: PretrainedConfig) -> list[int]:
    """Return the layers that keep keys and values: all kinds that are not known to have none."""
    return [layer for layer, kind in enumerate(kinds_of(config)) if kind not in RECURRENT | NEITHER]


def unknown_recurrent(config: PretrainedConfig) -> str | None:
    """Return what recurrent layers there are that a tree cannot pass; None where it can pass all of them."""
    if not has_recurrent_layers(config):
        return None
    if getattr(config, "num_mem_blocks", None):  # Zamba's: their caches are the layers' own all the same
        return "layers that share one block of attention"
    return None if _has_known_functions(config) or reads_by_levels(config) else "recurrent layers of a kind of its own"


def reads_by_levels(config: PretrainedConfig) -> bool:
    """Return whether recurrent layers are read level by level: we know where their states are, not how they come."""
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
    """Return what the family's module has, by name."""
    return vars(importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_")))


def num_chosen(config: PretrainedConfig) -> int:
    """Return the number of experts that a token meets in a layer; 0 where the layers have none."""
    if not any(getattr(config, key, None) for key in EXPERT_COUNTS):
        return 0
    return next((int(count) for key in CHOSEN_COUNTS if (count := getattr(config, key, None))), 1)


def chosen_experts(config: PretrainedConfig) -> tuple[int | None, float]:
    """Return how many experts a layer has, None where it has none, and the share of them that a token meets."""
    num_experts = next((int(count) for key in EXPERT_COUNTS if (count := getattr(config, key, None))), None)
    return num_experts, num_chosen(config) / num_experts if num_experts else 1.0
