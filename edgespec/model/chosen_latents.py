"""Latent attention with an index: only latents that some row chose are expanded to keys and values.

transformers' layers expand all latents of a text before their index chooses. Here they hand latents through, and the
attention function expands those that are read, in the order of their places, and then calls the family's own one.
Legend: m rows, j latents of the text, k of them that a row chose, u that some row chose.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from edgespec.model.layer_kinds import INDEXED, kinds_of
from edgespec.model.pass_cache import spans_under_way

NAME = "edgespec_chosen_latents"
Attention = Callable[..., tuple[Tensor, Tensor | None]]  # of transformers' registry


@dataclass(frozen=True, slots=True, kw_only=True)
class _Own:
    """What a layer has for its latents, and what it had before."""

    config: PretrainedConfig
    attention: Attention
    keeps_row_bits: bool


def use_chosen_latents(decoder: nn.Module, *, keeps_row_bits: bool = False) -> list[nn.Module]:
    """Let a decoder's latent attention with an index expand what rows chose, and return its modules.

    Other models may share their configuration, so they get a copy. With `keeps_row_bits` a row that does not see all
    of its text gets the same bits alone and among others.
    """
    found = [part for part in decoder.modules() if hasattr(part, "expand_kv") and _is_indexed(part)]
    copies: dict[int, Any] = {}
    for module in found:
        config: Any = module.config
        eager = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
        plain = ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, eager)
        module.latents = _Own(config=config, attention=plain, keeps_row_bits=keeps_row_bits)  # type: ignore[assignment]
        module.expand_kv = _as_they_are  # type: ignore[assignment]
        if id(config) not in copies:
            copies[id(config)] = copy.deepcopy(config)
            copies[id(config)]._attn_implementation = NAME
        module.config = copies[id(config)]
    return found


def use_all_latents(modules: list[nn.Module]) -> None:
    """Give modules their own expansion and configuration again."""
    for module in modules:
        own: Any = module.__dict__.pop("latents")
        module.config = own.config
        module.__dict__.pop("expand_kv")


def _is_indexed(module: Any) -> bool:
    """Return whether a layer chooses its keys, or shares what another one chose: in some families, few do."""
    kind: str = kinds_of(module.config)[module.layer_idx]
    return kind == INDEXED


def _as_they_are(latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    return latents, rotated


def attend_latents(
    module: Any,
    query: Tensor,
    latents: Tensor,
    rotated: Tensor,
    attention_mask: Tensor,
    indices: Tensor | None = None,
    **named: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return the attention [1, m, heads, d] of rows [1, heads, m, d] to latents [1, 1, j, r] and what is rotated.

    The mask [1, 1, m, j] is 0 for what a row sees; of these it reads those at its `indices` [1, m, k], if there are.
    """
    own: _Own = module.latents
    num_latents, least = latents.shape[2], torch.finfo(query.dtype).min
    if attention_mask.dtype == torch.bool:  # outside a pass of ours
        attention_mask = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill_(~attention_mask, least)
    if indices is not None:
        hidden = torch.ones_like(attention_mask, dtype=torch.bool).scatter_(3, indices[:, None].long(), value=False)
        attention_mask = attention_mask.masked_fill(hidden, least)
    seen = attention_mask == 0
    is_whole = num_latents <= module.config.index_topk  # each latent is seen by some row
    if not is_whole:
        # The number of them is a shape: a card is waited for once a layer.
        places = seen.flatten(0, 2).any(0).nonzero()[:, 0]  # [u]
        latents, rotated, seen, attention_mask = (
            whole.index_select(dim, places)
            for whole, dim in ((latents, 2), (rotated, 2), (seen, 3), (attention_mask, 3))
        )
    keys, values = type(module).expand_kv(module, latents, rotated)
    if is_whole or not own.keeps_row_bits or not _are_single(query.shape[2]):
        return own.attention(module, query, keys, values, attention_mask, **named)
    # Sums are rounded in the order of their keys: each row's own are put together, in the same memory for all rows.
    memory = [whole.new_empty(whole.numel()) for whole in (keys, values)]
    found = query.new_empty(1, query.shape[2], query.shape[1], values.shape[3])
    for row, chosen in enumerate(seen[0, 0]):
        own_places = chosen.nonzero()[:, 0]
        parts = (_gathered(*pair, own_places) for pair in zip((keys, values), memory, strict=True))
        found[:, row : row + 1] = own.attention(module, query[:, :, row : row + 1], *parts, None, **named)[0]
    return found, None


def _gathered(whole: Tensor, memory: Tensor, places: Tensor) -> Tensor:
    """Return what lies in [1, heads, u, d] at some places [k] of all heads, in the memory [1 * heads * u * d]."""
    shape = (1, whole.shape[1], places.shape[0], whole.shape[3])
    return torch.index_select(whole, 2, places, out=memory[: math.prod(shape)].view(shape))


def _are_single(num_rows: int) -> bool:
    """Return whether rows may also come alone, or beside others: rows of a prompt come as they are."""
    spans = spans_under_way.get()
    return num_rows == 1 or (spans is not None and spans[0].rows.visible is not None)


AttentionInterface.register(NAME, attend_latents)
