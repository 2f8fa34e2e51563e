"""The rows that a pass appends to texts, one text's after the other, and the parts that pass a layer at once.

A text's rows see all of its cache but the last `tail` keys, the new rows among them; of those each row sees what
`visible` says, or without it all keys up to itself. Legend: n new rows of a text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from edgespec.model.reach import Reach, causal_mask
from edgespec.model.text_cache import TextCache

ALL_PROMPT_ROWS = 8192  # of several prompts that a pass reads; one alone is read whole


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRows:
    """Rows for one text, which must not have others in the same pass."""

    cache: TextCache
    ids: Tensor  # [n]
    positions: Tensor  # [tail], of the last keys; the new rows are the last n of them
    visible: Tensor | None = None  # [n, tail] bool; None: rows of a text, in order
    previous: Tensor | None = None  # [n, h], the features before the new rows, which a feature head reads

    @property
    def count(self) -> int:
        """The number of new rows."""
        return self.ids.shape[0]

    @property
    def row_positions(self) -> Tensor:
        """The positions of the new rows: [n]."""
        return self.positions[self.positions.shape[0] - self.count :]


def next_rows(cache: TextCache, ids: Tensor, *, previous: Tensor | None = None) -> NewRows:
    """Return rows of text that continue what is in use of the cache."""
    start = cache.length
    positions = torch.arange(start, start + ids.shape[0], device=ids.device)
    return NewRows(cache=cache, ids=ids, positions=positions, previous=previous)


@dataclass(slots=True)
class Span:
    """Rows [first, end) of a text's new rows; `masks` keeps what their layers have in common."""

    rows: NewRows
    first: int
    end: int
    masks: dict[Reach, Tensor] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """The number of rows."""
        return self.end - self.first

    @property
    def positions(self) -> Tensor:
        """The positions of the rows: [count]."""
        return self.rows.row_positions[self.first : self.end]

    def mask(self, num_keys: int, reach: Reach, dtype: torch.dtype) -> Tensor:
        """Return what is added to the scores of the rows and of all keys in use: [rows, keys].

        A tree's mask is kept for the layers that follow. That of a text, which may be long, is made again.
        """
        kept = self.masks.get(reach)
        if kept is None:
            kept = additive(self._visible(num_keys, reach), dtype)
            if self.rows.visible is not None:
                self.masks[reach] = kept
        return kept

    def _visible(self, num_keys: int, reach: Reach) -> Tensor:
        device = self.rows.ids.device
        if self.rows.visible is None:
            return causal_mask(self.count, num_keys, device=device, reach=reach)
        behind = self.rows.count - self.end  # new rows that come later
        tail = self.rows.positions.shape[0] - behind
        num_before = num_keys - tail
        before = torch.ones(self.count, num_before, dtype=torch.bool, device=device)
        visible = torch.cat([before, self.rows.visible[self.first : self.end, :tail]], 1)
        if reach.size is None:
            return visible
        key_positions = torch.cat([torch.arange(num_before, device=device), self.rows.positions[:tail]])
        return visible & reach.sees(self.positions[:, None], key_positions)


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 0 where `visible` holds, and the least number elsewhere."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, torch.finfo(dtype).min)


def chunks_of(parts: Sequence[NewRows], *, most_rows: int, text_by_text: bool) -> list[list[Span]]:
    """Return the rows of a pass in chunks of nearly equal size, with `most_rows` at most, or of one text each."""
    if text_by_text:
        return [[span] for part in parts for span in _cut(part, most_rows)]
    total = sum(part.count for part in parts)
    size = -(-total // -(-total // most_rows)) if total else 1
    chunks: list[list[Span]] = [[]]
    room = size
    for part in parts:
        first = 0
        while first < part.count:
            if room == 0:
                chunks.append([])
                room = size
            end = min(part.count, first + room)
            chunks[-1].append(Span(part, first, end))
            room -= end - first
            first = end
    return chunks


def _cut(part: NewRows, most_rows: int) -> Iterator[Span]:
    for first in range(0, part.count, most_rows):
        yield Span(part, first, min(part.count, first + most_rows))
