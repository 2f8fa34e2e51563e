"""Attention text by text: each text's rows attend to its own cache, while linear layers see all texts' rows at once.

`attend` is registered with transformers as an attention function. Families that use the registry call it in every
layer with whatever their attention has: windows, soft caps and sinks come as keywords, so that no family needs a form
of its own. Legend: m rows of a text in this layer, keys are all rows of its cache; heads of queries share those of
keys in groups.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from edgespec.errors import EdgespecError
from edgespec.model.layer_kinds import has_recurrent_layers, num_attention_layers
from edgespec.model.new_rows import Span
from edgespec.model.pass_cache import spans_under_way
from edgespec.model.text_cache import LayerCache

NAME = "edgespec"


def asks_for_attention(model: PreTrainedModel) -> bool:
    """Return whether a family asks the registry for attention, or has none."""
    if getattr(model, "_supports_attention_backend", False):
        return True
    # Families with recurrent layers do not say so, because of those.
    config = model.config.get_text_config(decoder=True)
    asks = "ALL_ATTENTION_FUNCTIONS" in vars(sys.modules[type(model).__module__])
    return has_recurrent_layers(config) and (asks or not num_attention_layers(config))


def use_own_attention(model: PreTrainedModel) -> None:
    """Let a model's layers call `attend`, where its family asks the registry at all.

    Its configuration may be others' as well: theirs stays.
    """
    own: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PretrainedConfig):
            if id(config) not in own:
                own[id(config)] = copy.deepcopy(config)
                own[id(config)]._attn_implementation = NAME
            module.config = own[id(config)]


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return what the rows of all texts attend to, [1, rows, heads, head_dim], for query [1, heads, rows, head_dim].

    `key` and `value` [1, key heads, rows, head_dim] are those of the new rows, which the texts' caches gain.
    """
    spans = spans_under_way()
    if spans is None or kwargs.get("position_bias") is not None:
        raise EdgespecError(
            "E_UNSUPPORTED_ARCHITECTURE", "this attention cannot be computed text by text.", "Use another model."
        )
    del attention_mask
    layer = module.layer_idx
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attended, first = [], 0
    for span in spans:
        rows = slice(first, first + span.count)
        first += span.count
        own = _Attention(span, span.rows.cache.layers[int(layer)], sliding_window or None, scale)  # type: ignore[arg-type]
        new = query[:, :, rows], key[:, :, rows], value[:, :, rows]
        attended.append(own.plain(*new) if softcap is None and s_aux is None else own.capped(*new, softcap, s_aux))
    whole = attended[0] if len(attended) == 1 else torch.cat(attended, 2)
    return whole.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attend)


class _Attention:
    """One text's rows in one layer."""

    def __init__(self, span: Span, cache: LayerCache, window: int | None, scale: float) -> None:
        self.span, self.cache, self.window, self.scale = span, cache, window, scale

    def plain(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return softmax(scores) @ values: [1, heads, m, head_dim]."""
        keys, values = self.cache.append(key, value)
        num_rows, num_keys = query.shape[2], keys.shape[2]
        is_text = self.span.rows.visible is None
        window = self.window if self.window is not None and self.window < num_keys else None
        if is_text and num_rows == 1:
            if window is not None:
                keys, values = keys[:, :, -window:], values[:, :, -window:]
            return self._folded(query, keys, values, None)
        if is_text and num_rows == num_keys and window is None:
            return scaled_dot_product_attention(
                query, keys, values, is_causal=True, scale=self.scale, enable_gqa=keys.shape[1] != query.shape[1]
            )
        return self._folded(query, keys, values, self.span.mask(num_keys, window, query.dtype))

    def _folded(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Attend with the rows of a group one after the other, so that keys and values need not be repeated."""
        _, heads, num_rows, head_dim = query.shape
        groups = heads // keys.shape[1]
        folded = query.reshape(1, keys.shape[1], groups * num_rows, head_dim)
        mask = mask if mask is None or groups == 1 else mask.repeat(groups, 1)
        found = scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=self.scale)
        return found.reshape(1, heads, num_rows, values.shape[-1])

    def capped(self, query: Tensor, key: Tensor, value: Tensor, softcap: float | None, sinks: Tensor | None) -> Tensor:
        """Return the same with capped scores, or with `sinks` [heads] that take their part of the attention."""
        keys, values = self.cache.append(key, value)
        _, heads, num_rows, head_dim = query.shape
        key_heads, num_keys = keys.shape[1], keys.shape[2]
        folded = query.reshape(1, key_heads, -1, head_dim)
        scores = (folded @ keys.transpose(2, 3)).reshape(1, heads, num_rows, num_keys) * self.scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        window = self.window if self.window is not None and self.window < num_keys else None
        if num_rows > 1 or window is not None:
            scores = scores + self.span.mask(num_keys, window, query.dtype)
        if sinks is not None:
            scores = torch.cat([scores, sinks.to(scores.dtype).reshape(1, -1, 1, 1).expand(1, -1, num_rows, 1)], -1)
        weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)[..., :num_keys]
        found = weights.reshape(1, key_heads, -1, num_keys) @ values
        return found.reshape(1, heads, num_rows, values.shape[-1])
