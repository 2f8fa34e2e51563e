"""The rows that a pass appends to texts, one text's after the other, and the parts that pass a layer at once.

A text's rows see all of its cache but the last `tail` keys, the new rows among them; of those each row sees what
`visible` says, or without it all keys up to itself. Legend: n new rows of a text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from edgespec.model.attention_window import AttentionWindow
from edgespec.model.partial_attention import MASK_WIDTH
from edgespec.model.text_cache import TextCache

ALL_PROMPT_ROWS = 8192  # of several prompts that a pass reads; one alone is read whole


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRows:
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


def next_rows(cache: TextCache, ids: Tensor, *, previous: Tensor | None = None) -> PassRows:
    """Return rows of text that continue what is in use of the cache."""
    start = cache.length
    positions = torch.arange(start, start + ids.shape[0], device=ids.device)
    return PassRows(cache=cache, ids=ids, positions=positions, previous=previous)


@dataclass(frozen=True, slots=True)
class SeenKeys:
    """Which of a text's keys some rows see: those from `first` on, all rows those from `shared` up to `tail`."""

    first: int
    shared: int
    tail: int
    end: int

    @property
    def num_shared(self) -> int:
        """The number of keys that need no mask."""
        return self.tail - self.shared

    def masked(self, keys: Tensor) -> Tensor:
        """Return the keys, or values, that not all rows see: [1, heads, masked keys, head_dim]."""
        if self.num_shared == 0 or self.shared == self.first:
            return keys[:, :, self.tail if self.num_shared else self.first : self.end]
        return torch.cat([keys[:, :, self.first : self.shared], keys[:, :, self.tail : self.end]], 2)


@dataclass(slots=True)
class Span:
    """Rows [first, end) of a text's new rows; `masks` keeps what their layers have in common."""

    rows: PassRows
    first: int
    end: int
    masks: dict[tuple[SeenKeys, AttentionWindow], Tensor] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """The number of rows."""
        return self.end - self.first

    @property
    def positions(self) -> Tensor:
        """The positions of the rows: [count]."""
        return self.rows.row_positions[self.first : self.end]

    def seen(self, num_keys: int, window: AttentionWindow, *, least_shared: int | None = None) -> SeenKeys:
        """Return which of the keys in use the rows see, with a shared part where that has `least_shared` keys."""
        tail = num_keys - self._num_tail
        first = window.first_seen(tail)  # no row lies before the tail's first
        shared = max(first, window.first_seen(num_keys - 1))
        is_split = least_shared is not None and tail - shared >= max(1, least_shared)
        return SeenKeys(first=first, shared=shared if is_split else tail, tail=tail, end=num_keys)

    def mask(self, seen: SeenKeys, window: AttentionWindow, dtype: torch.dtype) -> Tensor:
        """Return what is added to the scores of the rows and of the masked keys: [rows, masked keys].

        A tree's mask is kept for the layers that follow. That of a text, which may be long, is made again.
        """
        kept = self.masks.get((seen, window))
        if kept is None:
            kept = additive(self._visible(seen, window), dtype)
            if self.rows.visible is not None:
                self.masks[seen, window] = kept
        return kept

    @property
    def _num_tail(self) -> int:
        """The number of the last keys, those that some row does not see because they come later or lie beside it."""
        behind = self.rows.count - self.end  # new rows that come later
        return self.count if self.rows.visible is None else self.rows.positions.shape[0] - behind

    def _visible(self, seen: SeenKeys, window: AttentionWindow) -> Tensor:
        device, num_tail = self.rows.ids.device, seen.end - seen.tail
        before = torch.arange(seen.first, seen.shared, device=device)
        if self.rows.visible is None:
            tail = torch.arange(seen.tail, seen.end, device=device)
            rows, visible = tail[:, None], tail <= tail[:, None]
        else:
            tail = self.rows.positions[:num_tail]
            rows, visible = self.positions[:, None], self.rows.visible[self.first : self.end, :num_tail]
        visible = torch.cat([visible.new_ones(self.count, before.shape[0]), visible], 1)
        return visible if window.size is None else visible & window.sees(rows, torch.cat([before, tail]))


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 0 where `visible` [rows, keys] holds, and the least number elsewhere; in memory rows are padded."""
    rows, keys = visible.shape
    padded = torch.zeros(rows, -(-keys // MASK_WIDTH) * MASK_WIDTH, dtype=dtype, device=visible.device)
    return padded[:, :keys].masked_fill_(~visible, torch.finfo(dtype).min)


def chunks_of(parts: Sequence[PassRows], *, most_rows: int, text_by_text: bool) -> list[list[Span]]:
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


def _cut(part: PassRows, most_rows: int) -> Iterator[Span]:
    for first in range(0, part.count, most_rows):
        yield Span(part, first, min(part.count, first + most_rows))
