"""The attention of each layer as its configuration states it: how far it sees, and whose keys it reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from edgespec.model.attention_window import WHOLE, AttentionWindow

SLIDING = {"sliding_attention", "hybrid_sliding"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAttention:
    """What a layer's call of attention does not say itself."""

    window: AttentionWindow  # a window also comes with the call
    source: int  # the layer whose keys and values are read: its own, or an earlier one that it shares them with
    query_growth: QueryGrowth | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryGrowth:
    """Llama 4's layers without rotation: queries grow by the logarithm of the position's step."""

    step: float
    factor: float

    def of(self, positions: Tensor) -> Tensor:
        """Return what the queries of these positions [n] are multiplied by: [n]."""
        return torch.log1p(torch.floor((positions.float() + 1.0) / self.step)) * self.factor + 1.0


def layer_reaches(config: PretrainedConfig) -> list[AttentionWindow]:
    """Return each layer's reach, as far as the configuration names kinds of layers."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return [_reach(kind, of) for kind, of in zip(kinds, config.per_layer_config, strict=True)]


def _reach(kind: str, of: PretrainedConfig) -> AttentionWindow:
    if kind == "chunked_attention":
        return AttentionWindow(of.attention_chunk_size, in_chunks=True)
    return AttentionWindow(getattr(of, "sliding_window", None)) if kind in SLIDING else WHOLE


def key_sources(config: PretrainedConfig) -> list[int]:
    """Return the layer whose keys and values each layer reads; most families' layers read their own."""
    modes = getattr(config, "kv_sharing_modes", None) or [None] * config.num_hidden_layers
    stored = {config.layer_types[layer]: layer for layer, mode in enumerate(modes) if mode == "store"}
    return [stored[config.layer_types[layer]] if mode == "reuse" else layer for layer, mode in enumerate(modes)]


def take_over_query_growth(module: nn.Module) -> QueryGrowth | None:
    """Return how a module's queries grow, which it leaves to us from now on.

    Llama 4 counts a query's position from the cache's slots, where siblings would have different ones.
    """
    if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
        return None
    module.attn_temperature_tuning = False  # type: ignore[assignment]
    return QueryGrowth(step=module.floor_scale, factor=module.attn_scale)  # type: ignore[arg-type]
