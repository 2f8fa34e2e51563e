"""What a configuration states of its layers: their kinds, their experts, and values that single layers have."""

from typing import Any

from transformers import PretrainedConfig

EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")  # families' names
CHOSEN_COUNTS = ("num_experts_per_tok", "top_k_experts")


def kinds_of(config: PretrainedConfig) -> list[str]:
    """Return each layer's kind, as transformers names it."""
    kinds = getattr(config, "layer_types", None)
    return list(kinds) if kinds else ["full_attention"] * int(getattr(config, "num_hidden_layers", 0))


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
