"""Attention of rows to keys that each of them chose: these are gathered, so that the context may have any length.

Legend: m rows, g groups of heads with a choice of their own, k places that a row chose, d the width of a head.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from edgespec.model.pass_rows import LayerRows

CHOSEN_BYTES = 8 << 20  # of chosen keys and values in memory at once: a processor's cache holds them
CARD_CHOSEN_BYTES = 256 << 20  # on a card, which is given much to do at once


@dataclass(frozen=True, slots=True)
class ChosenKeys:
    """Rows of a layer that read the keys at places [g, m, k] alone, -1 for none."""

    places: Tensor
    keeps_values = True

    def attend(self, of: LayerRows, query: Tensor, *, sinks: Tensor | None, row_by_row: bool) -> Tensor:
        """Return the attention [1, heads, m, d]: each row has as many places as every other."""
        assert sinks is None
        return attend_chosen(query, of.keys, of.values, self.places, of.scale)


def attend_chosen(
    query: Tensor, keys: Tensor, values: Tensor, places: Tensor, scale: float, *, sinks: Tensor | None = None,
    row_by_row: bool = False,
) -> Tensor:  # fmt: skip
    """Return the attention [1, heads, m, d] of rows to the keys at their places [g, m, k], -1 for none, in their order.

    `keys` and `values` [1, key heads, keys, d] are all that are in use. Each row is computed by itself, with as many
    keys as every other: it has the same bits among any number of rows. Where that number depends on the other rows,
    `row_by_row` leaves out what a row does not see; then its heads choose the same. `sinks` [heads] take a share of the
    attention.
    """
    if row_by_row:
        alone = [places[:, row : row + 1] for row in range(places.shape[1])]
        pairs = zip(query.split(1, 2), (row[row >= 0][None, None] for row in alone), strict=True)
        return torch.cat([attend_chosen(of, keys, values, seen, scale, sinks=sinks) for of, seen in pairs], 2)
    heads = max(places.shape[0], keys.shape[1])  # of keys, or groups with a choice of their own
    queries = query[0].unflatten(0, (heads, -1)).permute(2, 0, 1, 3)  # [m, heads, group, d]
    num_rows, num_chosen = places.shape[1:]
    row_bytes = heads * num_chosen * (keys.shape[3] + values.shape[3]) * keys.element_size()
    most_bytes = CHOSEN_BYTES if keys.device.type == "cpu" else CARD_CHOSEN_BYTES
    at_once = max(1, min(num_rows, most_bytes // row_bytes))
    # The same memory for all rows: new memory costs more than what is copied there.
    memory = [whole.new_empty(heads, at_once * num_chosen, whole.shape[3]) for whole in (keys, values)]
    found = []
    for first in range(0, num_rows, at_once):
        of_rows = places[:, first : first + at_once]
        mask = torch.zeros(of_rows.shape, dtype=query.dtype, device=query.device)
        mask = mask.masked_fill_(of_rows < 0, torch.finfo(query.dtype).min).transpose(0, 1)[:, :, None]
        index = of_rows.clamp(min=0)
        of_keys = _gathered(keys[0], memory[0], index)
        of_values = of_keys if values is keys else _gathered(values[0], memory[1], index)
        rows = queries[first : first + at_once]
        if sinks is None:
            found.append(scaled_dot_product_attention(rows, of_keys, of_values, attn_mask=mask, scale=scale))
            continue
        scores = rows @ of_keys.mT * scale + mask
        of_sinks = sinks.to(scores.dtype).reshape(1, heads, -1, 1).expand(rows.shape[0], -1, -1, -1)
        weights = torch.cat([scores, of_sinks], -1).softmax(-1, dtype=torch.float32).to(query.dtype)
        found.append(weights[..., :-1] @ of_values)
    return torch.cat(found).permute(1, 2, 0, 3).flatten(0, 1)[None]


def _gathered(whole: Tensor, memory: Tensor, places: Tensor) -> Tensor:
    """Return what lies in [key heads, keys, d] at each row's places [g, m, k], for the heads of the memory.

    It is [m, heads, k, d], in the memory [heads, m * k, d] or more.
    """
    groups, rows, num_keys = places.shape
    heads = memory.shape[0]
    found = memory[:, : rows * num_keys]
    for head in range(heads):
        index = places[head * groups // heads].flatten()
        torch.index_select(whole[head * whole.shape[0] // heads], 0, index, out=found[head])
    return found.view(heads, rows, num_keys, -1).transpose(0, 1)
