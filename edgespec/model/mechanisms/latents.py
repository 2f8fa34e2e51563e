"""Latent attention: few rows read the latents of a text as they are kept, many have them expanded to keys and values.

A layer's keys and values are products of latents with one weight. The rows' queries can be multiplied with it instead,
and so can what they read ("absorbed", DeepSeek-V2, arXiv 2405.04434, section 2.1.2): then all heads share the latents.
For the rows of a prompt that takes longer, and transformers' layers expand all latents always. Here they hand latents
through, and the attention function does what costs less; where an index chose latents, rows read these alone.
Legend: m rows, h heads, j latents of the text, k of them that a row reads; r is the width of a latent, p that of what
is rotated, n and v those of a head's keys without it and of its values.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PretrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from edgespec.model.layer_kinds import kinds_of
from edgespec.model.mechanisms.chosen_keys import attend_chosen
from edgespec.model.mechanisms.indexed import INDEXED
from edgespec.model.mechanisms.mechanism import KeyShape, Mechanism, ModelParts, Uninstall, beside
from edgespec.model.pass_cache import spans_under_way
from offload.adapters.forward import adapter_matrices
from offload.packed_weight import weight_of

NAME = "edgespec_latents"
Attention = Callable[..., tuple[Tensor, Tensor | None]]  # of transformers' registry


@dataclass(frozen=True, slots=True, kw_only=True)
class _Own:
    """What a layer has for its latents, and what it had before."""

    config: PretrainedConfig
    attention: Attention
    keeps_row_bits: bool
    most_chosen: int | None  # by an index, for a row; None where rows see all


class Latents(Mechanism):
    """A latent for each row, of which all heads' keys and values are made, and a key with the position."""

    is_static = True

    def has_layers(self, config: PretrainedConfig) -> bool:
        """Return whether some layer keeps latents."""
        if not hasattr(config, "num_hidden_layers"):  # stacks that have configurations of their own
            return False
        return any(getattr(of, "kv_lora_rank", None) for of in config.per_layer_config)

    def is_text_by_text(self, config: PretrainedConfig) -> bool:
        """Return whether there are latents, which are far smaller than the keys that attention gets."""
        return self.has_layers(config)

    def install(self, parts: ModelParts) -> Uninstall:
        """Let a decoder's latent attention do what costs less."""
        return use_latents(parts.decoder, keeps_row_bits=parts.keeps_row_bits)

    def key_shape(self, config: PretrainedConfig, layer: int) -> KeyShape | None:
        """Return one row for all heads: the key's part with a position, and the latent."""
        of = config.per_layer_config[layer]
        if not getattr(of, "kv_lora_rank", None):
            return None
        rotates = (getattr(config, "no_rope_layers", None) or {layer: True})[layer]
        return KeyShape(heads=1, key_width=of.qk_rope_head_dim if rotates else 0, value_width=of.kv_lora_rank)


def use_latents(decoder: nn.Module, *, keeps_row_bits: bool = False) -> Uninstall:
    """Let a decoder's latent attention do what costs less.

    Other models may share its modules' configuration, so they get a copy. With `keeps_row_bits` a tree's row gets the
    bits that it gets alone.
    """
    found = [part for part in decoder.modules() if hasattr(part, "expand_kv")]
    copies: dict[int, Any] = {}
    for module in found:
        config: Any = module.config
        eager = beside(module, "eager_attention_forward")
        plain = ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, eager)
        # In some families few layers choose by an index, or share what another one chose.
        most_chosen = config.index_topk if kinds_of(config)[module.layer_idx] == INDEXED else None  # type: ignore[index]
        module.latents = _Own(  # type: ignore[assignment]
            config=config, attention=plain, keeps_row_bits=keeps_row_bits, most_chosen=most_chosen
        )
        module.expand_kv = _as_they_are  # type: ignore[assignment]
        if id(config) not in copies:
            copies[id(config)] = copy.deepcopy(config)
            copies[id(config)]._attn_implementation = NAME
        module.config = copies[id(config)]

    def give_back() -> None:
        for module in found:
            own: Any = module.__dict__.pop("latents")
            module.config = own.config
            module.__dict__.pop("expand_kv")

    return give_back


def _as_they_are(latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    return latents, rotated


def attend_latents(
    module: Any,
    query: Tensor,
    latents: Tensor,
    rotated: Tensor,
    attention_mask: Tensor,
    scaling: float,
    indices: Tensor | None = None,
    **named: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return the attention [1, m, h, v] of rows [1, h, m, n + p] to latents [1, 1, j, r].

    `rotated` [1, 1, j, p] are the parts of keys with positions. The mask [1, 1, m, j] is 0 for what a row sees; of
    these it reads those at its `indices` [1, m, k], if there are. Sinks `s_aux` [h] take a share of the attention.
    """
    own: _Own = module.latents
    if attention_mask.dtype == torch.bool:  # outside a pass of ours
        least = torch.finfo(query.dtype).min
        attention_mask = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill_(~attention_mask, least)
    num_latents, sinks = latents.shape[2], named.get("s_aux")
    chooses = own.most_chosen is not None and num_latents > own.most_chosen
    row_by_row = own.keeps_row_bits and _are_single(query.shape[2])
    if not (chooses or row_by_row or _costs_less(query, latents, rotated.shape[3], module.v_head_dim)):
        keys, values = type(module).expand_kv(module, latents, rotated)
        return own.attention(module, query, keys, values, attention_mask, scaling=scaling, **named)
    # [h, n + v, r]
    weight = weight_of(module.kv_b_proj).to(query.dtype).unflatten(0, (query.shape[1], -1))
    of_keys, of_values = weight.split([weight.shape[1] - module.v_head_dim, module.v_head_dim], 1)
    adapters = [
        (down, *up.unflatten(0, (query.shape[1], -1)).split([of_keys.shape[1], module.v_head_dim], 1), scale)
        for down, up, scale in adapter_matrices(module.kv_b_proj)
    ]
    plain, with_position = query.split([of_keys.shape[1], rotated.shape[3]], 3)
    absorbed = _multiplied(plain, of_keys, row_by_row)
    for down, up, _, scale in adapters:
        absorbed = absorbed + _multiplied(_multiplied(plain.float(), up, row_by_row), down, row_by_row) * scale
    absorbed = torch.cat([absorbed.to(query.dtype), with_position], 3)  # [1, h, m, r + p]
    kept = torch.cat([latents, rotated], 3)
    if chooses or row_by_row or sinks is not None:
        places = _seen(attention_mask[0, 0]) if indices is None else _chosen(attention_mask[0, 0], indices[0].long())
        found = attend_chosen(absorbed, kept, kept, places[None], scaling, sinks=sinks, row_by_row=row_by_row)
    else:
        kept = kept.expand(-1, query.shape[1], -1, -1)
        found = scaled_dot_product_attention(absorbed, kept, kept, attn_mask=attention_mask, scale=scaling)
    found = found[..., : latents.shape[3]]
    values = _multiplied(found, of_values.mT, row_by_row)
    for down, _, up, scale in adapters:
        values = values + _multiplied(_multiplied(found.float(), down.mT, row_by_row), up.mT, row_by_row) * scale
    return values.to(query.dtype).transpose(1, 2), None


def _costs_less(query: Tensor, latents: Tensor, width_rotated: int, width_value: int) -> bool:
    """Return whether m rows that read all latents as they are take fewer products than their expansion does.

    On a card, expanded keys and values have the widths that its kernels are for.
    """
    (num_rows, width), (num_latents, width_latent) = query.shape[2:], latents.shape[2:]
    width_expanded = width - width_rotated + width_value
    of_row = width_latent * width_expanded + num_latents * (2 * width_latent - width_expanded)
    return query.device.type == "cpu" and num_rows * of_row < num_latents * width_latent * width_expanded


def _multiplied(rows: Tensor, weight: Tensor, row_by_row: bool) -> Tensor:
    """Return each head's rows [1, h, m, i] times its weight [h, i, o]."""
    return torch.cat([row @ weight for row in rows.split(1, 2)], 2) if row_by_row else rows @ weight


def _chosen(mask: Tensor, indices: Tensor) -> Tensor:
    """Return the places [m, k] that rows chose among those that their mask shows, in order, each once; -1 for none."""
    indices = indices.sort(1).values  # sums are rounded in the order of their keys
    hidden = mask.gather(1, indices) != 0
    hidden[:, 1:] |= indices[:, 1:] == indices[:, :-1]
    return indices.masked_fill(hidden, -1)


def _seen(mask: Tensor) -> Tensor:
    """Return the places [m, k] that the rows' mask [m, j] shows, in order; -1 behind those of a row that sees fewer."""
    rows, places = (mask == 0).nonzero(as_tuple=True)
    counts = rows.bincount(minlength=mask.shape[0])
    found = places.new_full((mask.shape[0], int(counts.max())), -1)
    found[rows, torch.arange(rows.shape[0], device=rows.device) - (counts.cumsum(0) - counts)[rows]] = places
    return found


def _are_single(num_rows: int) -> bool:
    """Return whether rows may also come alone, or beside others: rows of a prompt come as they are."""
    spans = spans_under_way.get()
    return num_rows == 1 or (spans is not None and spans[0].rows.visible is not None)


AttentionInterface.register(NAME, attend_latents)
