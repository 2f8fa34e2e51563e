"""The rows that a pass appends to texts, one text after the other, and the chunks that pass a layer at once.

A chunk's spans go through attention one after the other, also those of one text: what has a number for each row and
key exists for one span, and all else of the layer takes the chunk at once.

A text's rows see all of its cache before the last `tail` keys, which include the new rows; in the tail each row sees
the keys that `visible` marks, or without it all keys up to itself. Legend: n new rows of a text.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from edgespec.model.mechanisms.row_paths import RowPaths
from edgespec.model.mechanisms.windows import WHOLE, AttentionWindow
from edgespec.model.seen_prompt import SeenPrompt
from edgespec.model.seen_rows import SeenRows, end_of_block, sees_in_blocks
from edgespec.model.text_cache import TextCache

MASK_WIDTH = 16  # numbers that a mask's row is padded to: CUDA's kernels need aligned rows
ALL_PROMPT_ROWS = 8192  # rows of several prompts in a pass
MOST_PROMPT_ROWS = 16384  # of a single one: beside their arithmetic another reading of the weights is little


@dataclass(frozen=True, slots=True, kw_only=True)
class LentRows:
    """What another model has kept of a text."""

    keys: Tensor  # [1, key heads, t, head_dim]
    values: Tensor
    visible: Tensor | None = None  # [n, t] bool; None: all of it, to each row


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRows:
    """All rows of one text in a pass."""

    cache: TextCache
    ids: Tensor  # [n]
    positions: Tensor  # [tail], of the last keys; the new rows are the last n of them
    visible: Tensor | None = None  # [n, tail] bool; None: rows of a text, in order
    previous: Tensor | None = None  # [n, h], the features before the new rows, which a feature head reads
    lent: Mapping[str, LentRows] | None = None  # by the kind of layer: all that the rows attend
    seen: SeenRows | None = None  # what rows of a text with pictures carry beside their ids
    one_by_one: bool = False  # each row passes a layer alone, as in plain decoding

    @property
    def count(self) -> int:
        """The number of new rows."""
        return self.ids.shape[0]

    @property
    def row_positions(self) -> Tensor:
        """The positions of the new rows: [n]."""
        return self.positions[self.positions.shape[0] - self.count :]


Runs = tuple[PassRows | None, PassRows | None, PassRows | None]  # of a text, in order: few rows, many, few


def next_rows(
    cache: TextCache,
    ids: Tensor,
    *,
    previous: Tensor | None = None,
    seen: SeenPrompt | None = None,
    one_by_one: bool = False,
) -> PassRows:
    """Return rows of text that continue the rows in use of a cache; `seen` is the text's prompt with pictures."""
    start = cache.length
    positions = torch.arange(start, start + ids.shape[0], device=ids.device)
    of_seen = None if seen is None else seen.rows(positions, first=start)
    return PassRows(cache=cache, ids=ids, positions=positions, previous=previous, seen=of_seen, one_by_one=one_by_one)


def by_length(part: PassRows, most_rows: int, few_rows: int) -> Runs:
    """Return a text's rows in order as few, many, and few behind these.

    Runs end where a multiple of `most_rows` of the text's tokens ends; at most `few_rows` up to there are few. So the
    way of a row hangs on no part in which its prompt is read.
    """
    if part.count <= few_rows:
        return None, None, part
    spans = _spans(part, most_rows)
    many = [span for span in spans if span.count > few_rows]
    first, end = (many[0].first, many[-1].end) if many else (spans[0].end, spans[0].end)
    return _rows_of(part, 0, first), _rows_of(part, first, end), _rows_of(part, end, part.count)


def _rows_of(part: PassRows, first: int, end: int) -> PassRows | None:
    """Return rows [first, end) of those of a text in order; None where there are none."""
    if first == end:
        return None
    previous = None if part.previous is None else part.previous[first:end]
    return replace(part, ids=part.ids[first:end], positions=part.positions[first:end], previous=previous)


@dataclass(frozen=True, slots=True)
class SeenKeys:
    """The range of a text's keys that rows see; all rows see those from `shared` up to `tail`."""

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
    """Rows [first, end) of a text's new rows, with the masks that their layers share."""

    rows: PassRows
    first: int
    end: int
    masks: dict[tuple[SeenKeys, AttentionWindow], Tensor] = field(default_factory=dict)
    kept_paths: list[Tensor] = field(default_factory=list)
    kept_row_paths: list[RowPaths] = field(default_factory=list)
    readings: dict[int, OwnReading] = field(default_factory=dict)  # of layers whose attention reads in a way of its own
    lent_keys: UserDict[str, tuple[Tensor, ...]] = field(default_factory=UserDict)  # that a layer lends to later ones
    stays_packed: bool = False  # packed weights are multiplied as they are, however many rows share the product
    experts_stay_packed: bool | None = None  # so are experts; None: where few rows chose one

    @property
    def count(self) -> int:
        """The number of rows."""
        return self.end - self.first

    @property
    def positions(self) -> Tensor:
        """The positions of the rows: [count]."""
        return self.rows.row_positions[self.first : self.end]

    def seen(self, num_keys: int, window: AttentionWindow, *, least_shared: int | None = None) -> SeenKeys:
        """Return the keys in use that the rows see, with a shared part if it has `least_shared` keys."""
        tail = num_keys - self.num_tail
        first = window.first_seen(tail)  # no row lies before the tail's first
        shared = max(first, window.first_seen(num_keys - 1))
        is_split = least_shared is not None and tail - shared >= max(1, least_shared)
        return SeenKeys(first=first, shared=shared if is_split else tail, tail=tail, end=num_keys)

    def mask(self, seen: SeenKeys, window: AttentionWindow, dtype: torch.dtype, blocks: Tensor | None = None) -> Tensor:
        """Return the mask that is added to the rows' scores: [rows, masked keys]; rows of `blocks` see each other.

        A tree's mask is kept for the following layers. That of a text, which may be long, is made again.
        """
        kept = self.masks.get((seen, window))
        if kept is None:
            kept = additive(self._visible(seen, window, blocks), dtype)
            if self.rows.visible is not None:
                self.masks[seen, window] = kept
        return kept

    def paths(self) -> list[Tensor]:
        """Return the places in the tail that each row of a tree sees, itself the last; layers share them."""
        if not self.kept_paths:
            assert self.rows.visible is not None
            seen = self.rows.visible[self.first : self.end, : self.num_tail]
            self.kept_paths = [row.nonzero()[:, 0] for row in seen]
        return self.kept_paths

    def row_paths(self, num_keys: int) -> RowPaths:
        """Return where the keys lie that each row sees, of those in use; layers that keep keys share it."""
        if not self.kept_row_paths:
            num_before, visible = num_keys - self.num_tail, self.rows.visible
            if visible is None:
                paths = RowPaths.of_text(self.count, num_before, self.rows.ids.device)
            else:
                paths = RowPaths.of_tree(visible[self.first : self.end, : self.num_tail], num_before)
            self.kept_row_paths.append(paths)
        return self.kept_row_paths[0]

    @property
    def num_tail(self) -> int:
        """The number of last keys that some row may not see: later rows, and other branches of the tree."""
        num_later = self.rows.count - self.end  # new rows
        return self.count if self.rows.visible is None else self.rows.positions.shape[0] - num_later

    def blocks(self, *, has_window: bool) -> Tensor | None:
        """Return the blocks [count] whose rows see each other in a layer, which may have a window; None without any."""
        seen = self.rows.seen
        if seen is None or seen.blocks is None or (seen.blocks_only_in_windows and not has_window):
            return None
        return seen.blocks[self.first : self.end].to(self.rows.ids.device)

    def _visible(self, seen: SeenKeys, window: AttentionWindow, blocks: Tensor | None) -> Tensor:
        device, num_tail = self.rows.ids.device, seen.end - seen.tail
        before = torch.arange(seen.first, seen.shared, device=device)
        if self.rows.visible is None:
            tail = torch.arange(seen.tail, seen.end, device=device)
            rows, visible = tail[:, None], tail <= tail[:, None]
            if blocks is not None:
                visible = visible | sees_in_blocks(blocks[:, None], blocks)
        else:
            tail = self.rows.positions[:num_tail]
            rows, visible = self.positions[:, None], self.rows.visible[self.first : self.end, :num_tail]
        visible = torch.cat([visible.new_ones(self.count, before.shape[0]), visible], 1)
        return visible if window == WHOLE else visible & window.sees(rows, torch.cat([before, tail]))


@dataclass(frozen=True, slots=True, kw_only=True)
class FewRows:
    """Which rows are so few that packed weights are multiplied with them as they are, by their own text alone."""

    span_rows: int
    prompt_tokens: int = 0  # of a text whose longer spans' experts are unpacked, however many chose them

    def say(self, span: Span) -> None:
        """Say it of a span."""
        span.stays_packed = span.rows.visible is not None or span.count <= self.span_rows
        span.experts_stay_packed = span.stays_packed or span.rows.cache.prompt_tokens < self.prompt_tokens


@dataclass(slots=True)  # made for each text in each layer: a frozen one takes four times as long
class LayerRows:
    """One text's rows in one layer, with all keys and values [1, key heads, keys, head_dim] up to the last of them."""

    span: Span
    keys: Tensor
    values: Tensor
    window: AttentionWindow
    scale: float
    blocks: Tensor | None = None  # [rows], where rows of a picture see each other in this layer


class OwnReading(Protocol):
    """How the rows of a span read one layer, where they do not read all keys of their windows: part of it leaves it."""

    keeps_values: bool  # whether the layer's keys have values beside them

    def attend(self, of: LayerRows, query: Tensor, *, sinks: Tensor | None, row_by_row: bool) -> Tensor:
        """Return the attention [1, heads, rows, d]; with `row_by_row`, with the bits that each row gets alone."""


def padded_width(keys: int) -> int:
    """Return the numbers in memory of a mask's row."""
    return -(-keys // MASK_WIDTH) * MASK_WIDTH


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 0 where `visible` [rows, keys] is true, the least number elsewhere; rows are padded in memory."""
    rows, keys = visible.shape
    padded = torch.zeros(rows, padded_width(keys), dtype=dtype, device=visible.device)
    return padded[:, :keys].masked_fill_(~visible, torch.finfo(dtype).min)


def chunks_of(
    parts: Sequence[PassRows],
    *,
    most_rows: int,
    text_by_text: bool,
    layer_rows: int = 0,
    few: FewRows | None = None,
    exact: bool = False,
) -> list[list[Span]]:
    """Return the rows of a pass in chunks of whole spans, of one text each if required.

    A span has at most `most_rows` rows, and a chunk those, or `layer_rows` if they are more. A text's rows are cut
    where a multiple of `most_rows` of its tokens ends: in what parts a prompt is read changes no sum. Rows that
    see each other are not parted: a span then has more rows. Spans of `few` rows share no chunk with longer ones, and
    experts of short prompts none with those of long ones: a row's bits hang on no company. Where it is `exact`, spans
    of texts pass alone, so that their rows have the bits that they have in any company; trees share chunks.
    """
    layer_rows = max(most_rows, layer_rows)
    chunks: list[list[Span]] = []
    free = 0
    for part in parts:
        is_alone = exact and part.visible is None
        free = 0 if text_by_text or is_alone else free
        for span in _spans(part, 1 if part.one_by_one else most_rows):
            if few is not None:
                few.say(span)
            if span.count > free or not _are_alike(chunks[-1][-1], span):
                chunks.append([])
                free = layer_rows
            chunks[-1].append(span)
            free = 0 if is_alone else free - span.count
    return chunks


def _are_alike(one: Span, other: Span) -> bool:
    """Return whether packed weights are multiplied with the rows of both in one way."""
    return (one.stays_packed, one.experts_stay_packed) == (other.stays_packed, other.experts_stay_packed)


def _spans(part: PassRows, most_rows: int) -> list[Span]:
    """Return a text's rows as spans that end at fixed tokens, or a tree's as nearly equal ones."""
    if part.visible is None:
        start = part.cache.length
        edges = [0, *range(most_rows - start % most_rows, part.count, most_rows), part.count]
        if part.seen is not None and part.seen.blocks is not None:
            blocks = part.seen.blocks.tolist()
            edges = sorted({end_of_block(blocks, edge) for edge in edges})
    else:
        count = -(-part.count // most_rows)
        edges = [part.count * number // count for number in range(count + 1)]
    return [Span(part, first, end) for first, end in pairwise(edges)]
