"""The attention of each layer, as its configuration states it: how far its rows see, and whose keys it reads.

Windows go by position, because the rows of a tree are not in the order of their positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from edgespec.model.layer_kinds import kinds_of
from edgespec.model.mechanisms.mechanism import Mechanism

SMALL_WINDOW = 8  # of a narrow copy: shorter than the trials' texts, so that a missing one shows
SLIDING = {"sliding_attention", "hybrid_sliding"}
LENT = -1  # no layer of the model


@dataclass(frozen=True, slots=True)
class AttentionWindow:
    """The positions, its own included, that a row sees: the last `size`, or those of its chunk of `size`."""

    size: int | None = None  # None: all
    in_chunks: bool = False  # chunks begin at multiples of their size
    first: int = 0  # keys before it are seen by their own rows alone
    is_causal: bool = False  # later positions are not seen, whatever rows say

    def within(self, num_keys: int) -> AttentionWindow:
        """Return the window for this number of keys: WHOLE if all of them fit, and are seen."""
        return self if self.size is not None and self.size < num_keys else replace(self, size=None, in_chunks=False)

    def first_seen(self, position: int) -> int:
        """Return the first position that a row at `position` sees."""
        least = min(self.first, position)
        if self.size is None:
            return least
        return max(least, position // self.size * self.size if self.in_chunks else position + 1 - self.size)

    def sees(self, rows: Tensor, keys: Tensor) -> Tensor:
        """Return whether keys lie in the windows of rows, for positions of any shapes that broadcast."""
        seen = (keys >= self.first) | (keys == rows)
        seen = seen & (keys <= rows) if self.is_causal else seen
        if self.size is None:
            return seen
        return seen & (rows // self.size == keys // self.size if self.in_chunks else rows - keys < self.size)


WHOLE = AttentionWindow()


class Windows(Mechanism):
    """Layers that see a part of the text alone, or read what another layer keeps."""

    kinds = frozenset({"sliding_attention", "chunked_attention"})
    is_static = True
    small_sizes: ClassVar = {
        **dict.fromkeys(
            ("sliding_window", "window_size", "attention_window_size", "attention_chunk_size"), SMALL_WINDOW
        ),
        "floor_scale": 4,  # a step of positions, by which queries grow
    }

    def unread_kinds(self, config: PretrainedConfig) -> dict[str, str]:
        """Return the kind whose windows go by places."""
        why = "count the generated tokens' places in a ring, whatever their positions"
        return {"reference_sliding_attention": why}

    def reason(self, config: PretrainedConfig) -> str | None:
        """Return what is unknown of layers that share keys and values."""
        if getattr(config, "num_kv_shared_layers", None) and not hasattr(config, "kv_sharing_modes"):
            return "shares keys and values among layers, which only a newer transformers shows"
        return None

    def layer_facts(self, config: PretrainedConfig, layer: int) -> object:
        """Return whether a layer reads what another one keeps."""
        return key_sources(config)[layer] != layer

    def kept_layers(self, config: PretrainedConfig, layers: Sequence[int]) -> dict[str, Any]:
        """Return which of the layers read what others keep."""
        changes: dict[str, Any] = {}
        sources = getattr(config, "kv_source_layers", None)
        if sources:
            places = {layer: place for place, layer in enumerate(layers)}
            changes["kv_source_layers"] = [places.get(sources[layer], places[layer]) for layer in layers]
        num_shared = getattr(config, "num_kv_shared_layers", None) or 0
        if num_shared:
            first = config.num_hidden_layers - num_shared
            changes["num_kv_shared_layers"] = sum(layer >= first for layer in layers)
        return changes


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAttention:
    """The facts of a layer's attention that its call does not state."""

    window: AttentionWindow  # a sliding window also comes with the call
    source: int  # the layer whose keys and values it reads: itself, or an earlier one
    query_growth: QueryGrowth | None = None
    keeps_row_bits: bool = False  # a tree's row gets the bits that it gets in plain decoding


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryGrowth:
    """Llama 4's layers without rotation: queries grow by the logarithm of the position's step."""

    step: float
    factor: float

    def of(self, positions: Tensor) -> Tensor:
        """Return the factors [n] of the queries of these positions [n]."""
        return torch.log1p(torch.floor((positions.float() + 1.0) / self.step)) * self.factor + 1.0


def layer_reaches(config: PretrainedConfig) -> list[AttentionWindow]:
    """Return each layer's window, as far as the configuration names kinds of layers."""
    return [_reach(kind, of) for kind, of in zip(kinds_of(config), config.per_layer_config, strict=True)]


def _reach(kind: str, of: PretrainedConfig) -> AttentionWindow:
    if kind == "chunked_attention":
        return AttentionWindow(of.attention_chunk_size, in_chunks=True)
    return AttentionWindow(getattr(of, "sliding_window", None)) if kind in SLIDING else WHOLE


def layer_windows(config: PretrainedConfig) -> dict[int, AttentionWindow]:
    """Return the windows of the layers whose rows see a part of the text alone, by their numbers."""
    return {layer: window for layer, window in enumerate(layer_reaches(config)) if window.size is not None}


def key_sources(config: PretrainedConfig) -> list[int]:
    """Return the layer whose keys and values each layer reads; in most families, each layer reads its own.

    It is LENT where another model has them.
    """
    if getattr(config, "kv_source_layers", None):
        return list(config.kv_source_layers)
    modes = getattr(config, "kv_sharing_modes", None) or [None] * config.num_hidden_layers
    stored = {config.layer_types[layer]: layer for layer, mode in enumerate(modes) if mode == "store"}
    kinds = enumerate(modes)
    return [stored.get(config.layer_types[layer], LENT) if mode == "reuse" else layer for layer, mode in kinds]


def take_over_query_growth(module: nn.Module) -> QueryGrowth | None:
    """Return the growth of a module's queries, and turn it off in the module.

    Llama 4 counts a query's position from the cache's slots, where siblings would have different ones.
    """
    if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
        return None
    module.attn_temperature_tuning = False  # type: ignore[assignment]
    return QueryGrowth(step=module.floor_scale, factor=module.attn_scale)  # type: ignore[arg-type]
