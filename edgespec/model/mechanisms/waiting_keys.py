"""Keys and values that wait in the host's memory, and come to the device while rows pass their layer.

Between passes the host has all rows, so that a commit, a cut and a copy are work of its own. In a pass each text's rows
of a layer come to one of two places on the device, while those before them are read in the other; a pass's new rows go
back as soon as they are there. When a pass has ended, nothing is on its way.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Self

import torch
from torch import Tensor

from edgespec.model.mechanisms.keys_values import LayerCache
from edgespec.model.mechanisms.windows import WHOLE, AttentionWindow
from offload.allocated import BLOCK_BYTES
from offload.device import Device, PinningError
from offload.device_slots import DeviceSlots
from offload.pinned import PinnedBuffer

NUM_PLACES = 2  # one is read while the other is filled


class KeyStream:
    """Brings the rows of layers that wait, text by text, in the order in which a pass reads them."""

    def __init__(
        self,
        device: Device,
        layers: Collection[int],
        *,
        row_bytes: int,
        slot_bytes: int = 0,
        windows: Mapping[int, AttentionWindow] | None = None,
    ) -> None:
        """A row of the widest of these layers has `row_bytes`; `slot_bytes` are enough for texts that were planned.

        Layers of `windows` never look at rows before them, which stay in RAM.
        """
        self.device = device
        self.windows = dict(windows or {})
        self.layers = frozenset(layers)
        self._row_bytes, self._slot_bytes = row_bytes, slot_bytes // BLOCK_BYTES * BLOCK_BYTES
        self._slots: DeviceSlots | None = None
        self._order: list[WaitingRows] = []  # of the running pass
        self._places: dict[int, int] = {}  # in the order, by identity
        self._held: list[WaitingRows | None] = [None] * NUM_PLACES
        self._read: int | None = None  # the slot that is being read

    @contextmanager
    def rows(self, texts: Sequence[tuple[Sequence[LayerCache], int]]) -> Iterator[None]:
        """Within this block a pass reads so many new rows of each text, whose layers these are."""
        found = [(layers[index], count) for index in sorted(self.layers) for layers, count in texts]
        waiting = [(layer, count) for layer, count in found if isinstance(layer, WaitingRows)]
        try:
            for layer, count in waiting:
                layer.begin(count)
            self._order = [layer for layer, _ in waiting]
            self._places = {id(layer): place for place, layer in enumerate(self._order)}
            self._make_room(max((layer.end for layer in self._order), default=0))
            self._fill_next(0, 0)
            yield
        finally:
            self._end()

    def has(self, layer: WaitingRows) -> bool:
        """Return whether the running pass reads the layer's rows."""
        return id(layer) in self._places

    def bring(self, layer: WaitingRows) -> Tensor:
        """Return the bytes on the device of a layer's rows, as `WaitingRows.parts` lays them out."""
        assert self._slots is not None
        slot = next((slot for slot, held in enumerate(self._held) if held is layer), None)
        if slot is None:  # rows that come again, or that were not foreseen: of what went back, too
            self._slots.copy_stream.wait_stream(self.device.current_stream())
            slot = 0 if self._read is None else 1 - self._read
            self._fill(slot, layer)
        if slot != self._read:
            if self._read is not None:
                self._slots.release(self._read)
            self._read = slot
            self._fill_next(1 - slot, self._places[id(layer)] + 1)
        return self._slots.acquire(slot)

    def _fill_next(self, slot: int, place: int) -> None:
        if place < len(self._order):
            self._fill(slot, self._order[place])

    def _fill(self, slot: int, layer: WaitingRows) -> None:
        assert self._slots is not None
        self._held[slot] = layer
        for at, rows in layer.parts():
            self._slots.fill(slot, rows, at=at)

    def _make_room(self, rows: int) -> None:
        needed_bytes = place_bytes(rows, self._row_bytes)
        if self._slots is None or needed_bytes > self._slot_bytes:
            self._slots, self._slot_bytes = None, max(needed_bytes, self._slot_bytes)
            self._slots = DeviceSlots(self.device, num_slots=NUM_PLACES, slot_bytes=self._slot_bytes)

    def _end(self) -> None:
        """Wait until nothing is on its way: the next pass finds all rows, and a text's memory may be let go."""
        if self._slots is not None:
            if self._read is not None:
                self._slots.release(self._read)
            self._slots.close()
        self.device.current_stream().synchronize()
        self._order, self._places, self._read = [], {}, None
        self._held = [None] * NUM_PLACES


def place_bytes(rows: int, row_bytes: int) -> int:
    """Return the bytes of a place on the device for a text of so many rows: values begin at a block's start."""
    return -(-rows * row_bytes // BLOCK_BYTES) * BLOCK_BYTES + BLOCK_BYTES


class WaitingRows(LayerCache):
    """One layer's keys and values of one text, in memory of the host that is locked as far as the system allows.

    Rows lie one after the other, each with all of its heads, so that those of a pass come and go in one piece.
    On the device those before the window of the first new row are not defined.
    """

    def __init__(self, step_rows: int, stream: KeyStream, window: AttentionWindow = WHOLE) -> None:
        super().__init__(step_rows)
        self._window = window
        self.end = 0  # rows in use when the running pass has ended
        self._stream = stream
        self._locked: list[PinnedBuffer] = []

    def begin(self, count: int) -> None:
        """Make room for so many more rows: within a pass memory stays where it is."""
        self.end = self.length + count
        if self._keys is not None:
            self.reserve(self.end)

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append rows [1, heads, n, head_dim], and return all rows in use: on the device where a pass runs."""
        if not self._stream.has(self):
            return super().append(keys, values)
        if self._keys is None:
            self._keys, self._values = keys[:, :, :0], values[:, :, :0]
            self.reserve(self.end)
        first, end = self.length, self.length + keys.shape[2]
        memory = self._stream.bring(self)
        there = [self._view(memory, at, like) for at, like in self._layout()]
        for rows, new, waiting in zip(there, (keys, values), self.storage, strict=True):
            rows[:, :, first:end] = new
            self._stream.device.copy_back(*(of[0, :, first:end].transpose(0, 1) for of in (rows, waiting)))
        self.length = end
        return there[0][:, :, :end], there[1][:, :, :end]

    def reserve(self, rows: int) -> None:
        """Allocate memory for `rows` rows in all; the cache must have had some."""
        if rows > self.capacity:
            num_before = len(self._locked)
            super().reserve(rows)
            del self._locked[:num_before]  # what lies there was copied

    def keep(self, committed: int, rows: Tensor, *, num_in_place: int = 0) -> None:
        """Move `rows` [j], counted from the cache's start, after the first `committed` ones; drop the rest."""
        is_moved = num_in_place < rows.shape[0]
        super().keep(committed, rows.cpu() if is_moved else rows, num_in_place=num_in_place)

    def copy(self, rows: int) -> Self:
        """Return a copy of the first `rows` rows, which waits, too."""
        other = type(self)(self._step_rows, self._stream, self._window)
        if self._keys is not None and self._values is not None and rows:
            other.append(self._keys[:, :, :rows], self._values[:, :, :rows])
        return other

    def parts(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the rows in use that new rows may see, as bytes, and where they come to lie on the device."""
        if self._keys is None or not self.length:
            return
        first = max(0, self._window.first_seen(self.length))
        for at, part in self._layout():
            rows = part[0, :, first : self.length].transpose(0, 1).view(torch.uint8).view(-1)
            if rows.numel():
                yield at + first * part.shape[1] * part.shape[3] * part.itemsize, rows

    def _layout(self) -> Iterator[tuple[int, Tensor]]:
        """Yield where keys and values begin on the device, and these themselves."""
        keys, values = self.storage
        yield 0, keys
        num_bytes = keys.shape[1] * self.end * keys.shape[3] * keys.itemsize
        yield -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES, values

    def _view(self, memory: Tensor, at: int, like: Tensor) -> Tensor:
        _, heads, _, width = like.shape
        num_bytes = heads * self.end * width * like.itemsize
        return memory[at : at + num_bytes].view(like.dtype).view(1, self.end, heads, width).transpose(1, 2)

    def _resized(self, old: Tensor, rows: int) -> Tensor:
        _, heads, _, head_dim = old.shape
        memory = self._waiting(heads * rows * head_dim * old.itemsize).view(old.dtype)
        new = memory.view(1, rows, heads, head_dim).transpose(1, 2)
        if self.length:
            new[:, :, : self.length] = old[:, :, : self.length]
        return new

    def _waiting(self, num_bytes: int) -> Tensor:
        """Return memory of the host; what cannot be locked is copied more slowly."""
        if num_bytes:
            try:
                self._locked.append(PinnedBuffer(num_bytes, device=self._stream.device))
                return self._locked[-1].bytes
            except PinningError:
                pass
        return torch.zeros(num_bytes, dtype=torch.uint8)
