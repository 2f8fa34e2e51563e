"""What rows of a pass carry beside token ids, where a prompt has pictures, and what a decoder then gets in their place.

Rows of a picture are embedded by a tower, and a family may let all rows of such a prompt rotate by positions of their
own, add features to some layers, or let the rows of a picture see each other. Texts with and without pictures share a
pass. Legend: n rows of a text, m of them embedded already, h the hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from edgespec.model.adapted_rows import adapted

if TYPE_CHECKING:
    from edgespec.model.pass_rows import PassRows

NO_BLOCK = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenRows:
    """What the rows of a text carry in a pass; a text's first m rows are those of its prompt."""

    embedded: Tensor | None = None  # [m, h]; None: no row is embedded
    are_words: Tensor | None = None  # [m] bool, of these rows the ones whose ids are embedded all the same
    rotated: Tensor | None = None  # [axes, n] positions by which rows rotate; None: their own
    deepstacked: Tensor | None = None  # [m] bool, rows to which layers add features
    deepstack: tuple[Tensor, ...] = ()  # those features [k, h], of each of the first layers
    per_layer: Tensor | None = None  # [m, layers, d]
    blocks: Tensor | None = None  # [n] on the host, the number of the block whose rows see each other, or NO_BLOCK
    blocks_only_in_windows: bool = False  # layers without a window see no later row


def are_seen(parts: Sequence[PassRows]) -> bool:
    """Return whether some rows of a pass carry more than ids."""
    return any(part.seen is not None for part in parts)


def position_ids(parts: Sequence[PassRows]) -> Tensor:
    """Return the positions by which all rows of a pass rotate: [1, n], or [axes, 1, n] where a text has several."""
    rotated = [None if part.seen is None else part.seen.rotated for part in parts]
    axes = next((own.shape[0] for own in rotated if own is not None), None)
    if axes is None:
        return torch.cat([part.row_positions for part in parts])[None]
    found = [
        part.row_positions.expand(axes, -1) if own is None else own for part, own in zip(parts, rotated, strict=True)
    ]
    return torch.cat(found, 1)[:, None]


def embedded_rows(part: PassRows, table: nn.Module) -> Tensor:
    """Return a text's rows as they enter a decoder: [n, h]."""
    own = None if part.seen is None else part.seen.embedded
    are_words = None if part.seen is None else part.seen.are_words
    num_own = 0 if own is None or are_words is not None else own.shape[0]
    if own is not None and num_own == part.count:
        return own
    ids = part.ids[num_own:]
    found: Tensor = adapted([(part.cache.adapters, ids.shape[0])], lambda: table(ids))
    if own is None:
        return found
    if are_words is not None:
        words, found = found.split([own.shape[0], part.count - own.shape[0]])
        own = torch.where(are_words[:, None], words, own)
    return torch.cat([own, found])


def decoder_inputs(parts: Sequence[PassRows], decoder: Any, table: nn.Module) -> dict[str, Any]:
    """Return what a decoder gets of all rows of a pass in place of ids, where some are embedded already."""
    inputs: dict[str, Any] = {"inputs_embeds": torch.cat([embedded_rows(part, table) for part in parts])[None]}
    deepstack = [part.seen.deepstack for part in parts if part.seen is not None and part.seen.deepstack]
    if deepstack:
        inputs["visual_pos_masks"] = torch.cat([_deepstacked(part) for part in parts])[None]
        inputs["deepstack_visual_embeds"] = [torch.cat(layer) for layer in zip(*deepstack, strict=True)]
    if any(part.seen is not None and part.seen.per_layer is not None for part in parts):
        inputs["per_layer_inputs"] = torch.cat([_per_layer(part, decoder, table) for part in parts])[None]
    return inputs


def _deepstacked(part: PassRows) -> Tensor:
    found = torch.zeros(part.count, dtype=torch.bool, device=part.ids.device)
    if part.seen is not None and part.seen.deepstacked is not None:
        found[: part.seen.deepstacked.shape[0]] = part.seen.deepstacked
    return found


def _per_layer(part: PassRows, decoder: Any, table: nn.Module) -> Tensor:
    own = None if part.seen is None else part.seen.per_layer
    num_own = 0 if own is None else own.shape[0]
    ids = part.ids[num_own:]
    if own is not None and not ids.shape[0]:
        return own
    runs = [(part.cache.adapters, ids.shape[0])]
    made: Tensor = adapted(runs, lambda: decoder.get_per_layer_inputs(ids[None], table(ids)[None])[0])
    return made if own is None else torch.cat([own, made])


def sees_in_blocks(rows: Tensor, keys: Tensor) -> Tensor:
    """Return whether rows [n, 1] of these blocks see keys [k] of theirs, whatever their order: [n, k]."""
    return (rows == keys) & (rows != NO_BLOCK)


def is_within_block(blocks: Sequence[int], row: int) -> bool:
    """Return whether a cut before this row parts rows of these blocks [n] that see each other."""
    return 0 < row < len(blocks) and blocks[row] != NO_BLOCK and blocks[row] == blocks[row - 1]


def end_of_block(blocks: Sequence[int], row: int) -> int:
    """Return the first place from this row on where rows of these blocks [n] may be cut."""
    while is_within_block(blocks, row):
        row += 1
    return row
