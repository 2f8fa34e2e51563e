"""A layer in parts of equal size: a few of them fit little locked memory, and reading one overlaps the last one's copy.

A part is a range of the layer's flat buffer. It holds pieces of the checkpoint's tensors, in the form that they are
computed in. Parameters that are no copy of their tensors, number by number, are made whole for each part that they
reach into: they are small, or rare.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from offload.checkpoint import FileRange, TensorEntry
from offload.layer_store import LayerRecord, LayerStore, StoredTensor, joined, sample_of


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShare:
    """The numbers that belong to a part: of one of the checkpoint's tensors, or of what a parameter is made of."""

    entries: tuple[TensorEntry, ...]  # the tensor, or all pieces of a parameter that is made whole
    made: StoredTensor | None  # that parameter
    num_numbers: int  # of the whole
    dtype: torch.dtype  # they are computed in
    first: int  # number of the whole
    end: int
    to: int  # byte of the part where the first number begins

    @property
    def num_bytes(self) -> int:
        """The bytes in the part."""
        return (self.end - self.first) * self.dtype.itemsize

    @property
    def file_ranges(self) -> tuple[FileRange, ...]:
        """The bytes of the files."""
        if self.made is None:
            return (self.entries[0].file_range(self.first, self.end),)
        return tuple(entry.file_range(0, math.prod(entry.shape)) for entry in self.entries)

    def numbers(self, store: LayerStore) -> Tensor:
        """Return the numbers from mapped pages, in a row."""
        if self.made is None:
            return store.numbers(self.entries[0], self.first, self.end)
        return store.made(self.made, self.dtype)[self.first : self.end]


@dataclass(frozen=True, kw_only=True)
class LayerPart:
    """The bytes [start, end) of a layer's flat buffer."""

    record: LayerRecord
    start: int
    end: int
    shares: tuple[TensorShare, ...]

    @cached_property
    def ranges(self) -> tuple[FileRange, ...]:
        """The ranges of the files that the part is read from."""
        return joined(found for share in self.shares for found in share.file_ranges)

    def read(self, store: LayerStore, memory: Tensor) -> None:
        """Bring the part from mapped pages into uint8 memory; raises StreamError."""
        store.populate_ranges(self.ranges)
        for share in self.shares:
            place = memory[share.to : share.to + share.num_bytes].view(share.dtype)
            place.copy_(share.numbers(store))
        store.drop_ranges(self.ranges)

    def add_samples(self, memory: Tensor, samples: dict[TensorEntry, bytes]) -> None:
        """Append to each tensor's sample what of it lies in the memory that the part was read into."""
        for share in self.shares:
            itemsize = share.dtype.itemsize
            first, end = sample_of(share.num_numbers * itemsize)
            before = share.first * itemsize
            found = memory[share.to + max(0, first - before) : share.to + min(end - before, share.num_bytes)]
            if first < share.end * itemsize and end > before:
                for entry in share.entries:
                    samples[entry] = samples.get(entry, b"") + found.numpy().tobytes()


def parts_of(record: LayerRecord, part_bytes: int) -> tuple[LayerPart, ...]:
    """Return the layer in parts of `part_bytes`, a multiple of the alignment; the last part may be smaller."""
    starts = range(0, record.flat_bytes, part_bytes)
    shares: list[list[TensorShare]] = [[] for _ in starts]
    for made, entries, dtype, begin in _places(record):
        count = math.prod(made.shape if made else entries[0].shape)
        stop = begin + count * dtype.itemsize
        for start in range(begin // part_bytes * part_bytes, stop, part_bytes):
            first, end = max(begin, start), min(stop, start + part_bytes)
            shares[start // part_bytes].append(
                TensorShare(
                    entries=entries,
                    made=made,
                    num_numbers=count,
                    dtype=dtype,
                    first=(first - begin) // dtype.itemsize,
                    end=(end - begin) // dtype.itemsize,
                    to=first - start,
                )
            )
    return tuple(
        LayerPart(record=record, start=start, end=min(start + part_bytes, record.flat_bytes), shares=tuple(of))
        for start, of in zip(starts, shares, strict=True)
    )


def _places(record: LayerRecord) -> Iterator[tuple[StoredTensor | None, tuple[TensorEntry, ...], torch.dtype, int]]:
    """Yield what a share may be of: a parameter that is made whole, tensors, the dtype, and where the first begins."""
    for tensor, offset in record.flat_places:
        if any(piece.computed is not None or piece.is_in_turn for piece in tensor.pieces):
            yield tensor, tensor.pieces, tensor.dtype, offset
            continue
        for piece in tensor.pieces:
            yield None, (piece,), tensor.dtype, offset
            offset += math.prod(piece.shape) * tensor.dtype.itemsize
