"""The attention of each layer, as its configuration states it: how far its rows see, and whose keys it reads.

Windows go by position, because the rows of a tree are not in the order of their positions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from edgespec.model.layer_kinds import kinds_of

SLIDING = {"sliding_attention", "hybrid_sliding"}


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


def key_sources(config: PretrainedConfig) -> list[int]:
    """Return the layer whose keys and values each layer reads; in most families, each layer reads its own."""
    if getattr(config, "kv_source_layers", None):
        return list(config.kv_source_layers)
    modes = getattr(config, "kv_sharing_modes", None) or [None] * config.num_hidden_layers
    stored = {config.layer_types[layer]: layer for layer, mode in enumerate(modes) if mode == "store"}
    return [stored[config.layer_types[layer]] if mode == "reuse" else layer for layer, mode in enumerate(modes)]


def take_over_query_growth(module: nn.Module) -> QueryGrowth | None:
    """Return the growth of a module's queries, and turn it off in the module.

    Llama 4 counts a query's position from the cache's slots, where siblings would have different ones.
    """
    if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
        return None
    module.attn_temperature_tuning = False  # type: ignore[assignment]
    return QueryGrowth(step=module.floor_scale, factor=module.attn_scale)  # type: ignore[arg-type]
