"""Attention text by text: each text's rows attend to its own cache, while linear layers see all texts' rows at once.

`attend` is registered with transformers as an attention function. Families that use the registry call it in every
layer with its windows, soft caps and sinks as keywords, so that no family needs code of its own.

All rows of a tree see the context before it: that part needs no mask, which would have rows x keys numbers. Only the
tree's own keys are masked, and both parts are joined by the sums of their weights. `scaled_dot_product_attention` does
not return these sums, so its kernels are called directly. Legend: m rows of a text in this layer, keys are all rows of
its cache; heads h of queries share those of keys in groups; d head_dim.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from edgespec.errors import EdgespecError
from edgespec.machine.device import is_before_ampere
from edgespec.model.mechanisms.known import attention_layers, mechanisms_of
from edgespec.model.mechanisms.mechanism import family_modules
from edgespec.model.mechanisms.windows import (
    WHOLE,
    AttentionWindow,
    LayerAttention,
    key_sources,
    layer_reaches,
    take_over_query_growth,
)
from edgespec.model.pass_cache import spans_under_way
from edgespec.model.pass_rows import LayerRows, padded_width

NAME = "edgespec"
MIN_SHARED = 2048  # keys that all rows see; with fewer, two kernels take longer than one with a mask
MAX_HEAD_DIM = 256  # of flash kernels
MAX_SCORES = 1 << 26  # scores of capped heads in memory at once


def uses_attention_registry(model: PreTrainedModel) -> bool:
    """Return whether a family takes attention from transformers' registry, or has none."""
    if getattr(model, "_supports_attention_backend", False):
        return True
    config = model.config.get_text_config(decoder=True)
    has_registry = any("ALL_ATTENTION_FUNCTIONS" in names for names in family_modules(type(model)))
    is_unflagged = any(record.is_unflagged for record in mechanisms_of(config))
    return is_unflagged and (has_registry or not attention_layers(config))


def use_own_attention(
    decoder: nn.Module,
    config: PretrainedConfig,
    *,
    keeps_row_bits: bool = False,
    windows: Sequence[AttentionWindow] | None = None,
) -> None:
    """Let a decoder's layers call `attend`, in a family that takes attention from the registry.

    Other models may share its configuration, so the decoder gets a copy. With `keeps_row_bits` a tree's row gets the
    bits that it gets in plain decoding. `windows` are the layers', where they are not those of the configuration.
    """
    own: dict[int, Any] = {}
    windows, sources = layer_reaches(config) if windows is None else windows, key_sources(config)
    for module in decoder.modules():
        layer = getattr(module, "layer_idx", None)
        if isinstance(layer, int) and layer < len(windows):
            module.layer_attention = LayerAttention(  # type: ignore[assignment]
                window=windows[layer],
                source=sources[layer],
                query_growth=take_over_query_growth(module),
                keeps_row_bits=keeps_row_bits,
            )
        theirs = getattr(module, "config", None)
        if isinstance(theirs, PretrainedConfig):
            if id(theirs) not in own:
                own[id(theirs)] = copy.deepcopy(theirs)
                own[id(theirs)]._attn_implementation = NAME
            module.config = own[id(theirs)]


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return the attention [1, rows, heads, head_dim] of the rows of all texts, for query [1, heads, rows, head_dim].

    `key` and `value` [1, key heads, rows, head_dim] belong to the new rows; they are appended to the texts' caches.
    """
    spans = spans_under_way.get()
    if spans is None or kwargs.get("position_bias") is not None:
        raise EdgespecError(
            "E_UNSUPPORTED_ARCHITECTURE", "this attention cannot be computed text by text.", "Use another model."
        )
    del attention_mask
    softcap, s_aux = kwargs.get("softcap"), kwargs.get("s_aux")
    of: LayerAttention = module.layer_attention  # type: ignore[assignment]
    layer: int = module.layer_idx  # type: ignore[assignment]
    window = of.window if of.window.in_chunks else replace(of.window, size=sliding_window or None)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attended, first = [], 0
    for span in spans:
        rows = slice(first, first + span.count)
        first += span.count
        queries = query[:, :, rows]
        if of.query_growth is not None:
            queries = (queries * of.query_growth.of(span.positions)[:, None]).to(query.dtype)
        cache = span.rows.cache.layers[of.source]
        reading = span.readings.pop(layer, None)
        row_by_row = span.rows.visible is not None and of.keeps_row_bits
        if of.source == layer:
            end = None if reading is None or reading.keeps_values else 0
            keys, values = cache.append(key[:, :, rows], value[:, :, rows, :end])
        else:  # the cache may have later rows of this pass already
            keys, values = cache.rows(cache.length - (span.rows.count - span.end))
        blocks = span.blocks(has_window=window.size is not None)
        own = _Attention(span, keys, values, window.within(keys.shape[2]), scale, blocks)
        if reading is not None:
            assert softcap is None
            attended.append(reading.attend(own, queries, sinks=s_aux, row_by_row=row_by_row))
        elif span.rows.visible is None and span.count == 1:
            attended.append(own.last_row(queries, softcap, s_aux))
        elif row_by_row:
            attended.append(own.row_by_row(queries, softcap, s_aux))
        elif softcap is None and s_aux is None:
            attended.append(own.plain(queries))
        else:
            attended.append(own.capped(queries, softcap, s_aux))
    whole = attended[0] if len(attended) == 1 else torch.cat(attended, 2)
    return whole.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attend)


class _Attention(LayerRows):
    def last_row(self, query: Tensor, softcap: float | None, sinks: Tensor | None) -> Tensor:
        """Return the attention of a text's last row, which sees all keys in its window: [1, heads, 1, head_dim]."""
        first = self.window.first_seen(self.keys.shape[2] - 1)
        keys, values = self.keys[:, :, first:], self.values[:, :, first:]
        if softcap is None and sinks is None:
            return self._folded(query, keys, values, None)
        return self._capped(query, keys, values, None, softcap, sinks)

    def row_by_row(self, query: Tensor, softcap: float | None, sinks: Tensor | None) -> Tensor:
        """Return the attention of a tree's rows, as if each were the last of a text: with the same bits.

        Sums are rounded in the order of their keys. Each row's ancestors therefore lie behind the context while it is
        computed, as they will if it becomes text; the cache has the order of the tree again afterwards.
        """
        tail = self.keys.shape[2] - self.span.num_tail
        places = self.keys[:, :, tail:], self.values[:, :, tail:]
        in_tree = [place.clone() for place in places]
        rows = []
        try:
            for row, path in enumerate(self.span.paths()):
                end = tail + path.shape[0]
                for place, whole in zip(places, in_tree, strict=True):
                    torch.index_select(whole, 2, path, out=place[:, :, : end - tail])
                keys, values = self.keys[:, :, :end], self.values[:, :, :end]
                alone = _Attention(self.span, keys, values, self.window.within(end), self.scale)
                rows.append(alone.last_row(query[:, :, row : row + 1], softcap, sinks))
        finally:
            for place, whole in zip(places, in_tree, strict=True):
                place.copy_(whole)
        return torch.cat(rows, 2)

    def plain(self, query: Tensor) -> Tensor:
        """Return softmax(scores) @ values: [1, heads, m, head_dim]."""
        keys, values = self.keys, self.values
        num_rows, num_keys = query.shape[2], keys.shape[2]
        is_text = self.span.rows.visible is None
        can_split = has_kernel(query.shape[-1], values.shape[-1], dtype=query.dtype, device=query.device)
        least_shared = MIN_SHARED if can_split else None
        if is_text and num_rows == num_keys and self.window == WHOLE and self.blocks is None:
            return scaled_dot_product_attention(
                query, keys, values, is_causal=True, scale=self.scale, enable_gqa=keys.shape[1] != query.shape[1]
            )
        seen = self.span.seen(num_keys, self.window, least_shared=least_shared)
        mask = self.span.mask(seen, self.window, query.dtype, self.blocks)
        if not seen.num_shared:
            return self._folded(query, seen.masked(keys), seen.masked(values), mask)
        folded, own = self._fold(query, mask)
        shared = slice(seen.shared, seen.tail)
        parts = (
            attend_part(folded, keys[:, :, shared], values[:, :, shared], None, self.scale),
            attend_part(folded, seen.masked(keys), seen.masked(values), own, self.scale),
        )
        return joined(*parts).reshape(query.shape)

    def _folded(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        folded, mask = self._fold(query, mask)
        found = scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=self.scale)
        return found.reshape(*query.shape[:3], values.shape[-1])

    def _fold(self, query: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return a group's query heads as further rows of their key head: keys and values need no copies."""
        key_heads = self.keys.shape[1]
        groups = query.shape[1] // key_heads
        folded = query.reshape(1, key_heads, -1, query.shape[-1])
        return folded, mask if mask is None or groups == 1 else repeated(mask, groups)

    def capped(self, query: Tensor, softcap: float | None, sinks: Tensor | None) -> Tensor:
        """Return the same with capped scores, or with `sinks` [heads] that take a share of the attention."""
        seen = self.span.seen(self.keys.shape[2], self.window)
        keys, values = seen.masked(self.keys), seen.masked(self.values)
        mask = self.span.mask(seen, self.window, query.dtype, self.blocks)
        at_once = max(1, MAX_SCORES // (query.shape[1] * keys.shape[2]))
        found = [
            self._capped(query[:, :, rows], keys, values, mask[rows], softcap, sinks)
            for first in range(0, query.shape[2], at_once)
            if (rows := slice(first, first + at_once))
        ]
        return found[0] if len(found) == 1 else torch.cat(found, 2)

    def _capped(
        self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        _, heads, num_rows, head_dim = query.shape
        key_heads, num_keys = keys.shape[1], keys.shape[2]
        folded = query.reshape(1, key_heads, -1, head_dim)
        scores = (folded @ keys.transpose(2, 3)).reshape(1, heads, num_rows, num_keys) * self.scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores if mask is None else scores + mask
        if sinks is not None:
            scores = torch.cat([scores, sinks.to(scores.dtype).reshape(1, -1, 1, 1).expand(1, -1, num_rows, 1)], -1)
        weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)[..., :num_keys]
        found = weights.reshape(1, key_heads, -1, num_keys) @ values
        return found.reshape(1, heads, num_rows, values.shape[-1])


def repeated(mask: Tensor, groups: int) -> Tensor:
    """Return a mask [rows, keys] repeated for each head of a group: [groups * rows, keys]; its rows stay padded."""
    rows, keys = mask.shape
    padded = mask.new_empty(groups, rows, padded_width(keys))
    padded[..., :keys] = mask
    return padded.flatten(0, 1)[:, :keys]


@dataclass(frozen=True, slots=True)
class AttentionPart:
    """The attention of rows to some keys [1, h, m, d], and the logarithm of the sum of its weights [1, h, m]."""

    attended: Tensor
    log_sum: Tensor


def has_kernel(key_dim: int, value_dim: int, *, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a kernel returns its sums for heads of these keys and values."""
    has_dtype = dtype != torch.bfloat16 or not is_before_ampere(device)
    return key_dim == value_dim <= MAX_HEAD_DIM and key_dim % 8 == 0 and has_dtype


def attend_part(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> AttentionPart:
    """Attend to these keys and values [1, h, keys, d] alone; `mask` [m, keys] is added to the scores."""
    ops = torch.ops.aten
    if not query.is_cuda:
        attended, log_sum = ops._scaled_dot_product_flash_attention_for_cpu(
            query, keys, values, 0.0, False, attn_mask=mask, scale=scale
        )
    elif mask is None and query.dtype != torch.float32 and not is_before_ampere(query.device):
        attended, log_sum = ops._scaled_dot_product_flash_attention(query, keys, values, 0.0, False, scale=scale)[:2]
    else:
        bias = None if mask is None else mask.expand(1, query.shape[1], *mask.shape)
        attended, log_sum = ops._scaled_dot_product_efficient_attention(
            query, keys, values, bias, True, 0.0, False, scale=scale
        )[:2]
    return AttentionPart(attended, log_sum.narrow(2, 0, query.shape[2]))  # the sums of some kernels are padded


def joined(first: AttentionPart, second: AttentionPart) -> Tensor:
    """Return the attention of rows to both parts together: [1, h, m, d]."""
    share = torch.sigmoid(second.log_sum - first.log_sum)[..., None]  # of the second part's weights in the sum
    return torch.lerp(first.attended.float(), second.attended.float(), share.float()).to(first.attended.dtype)
