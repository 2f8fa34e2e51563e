"""A layer in parts of equal size: a few of them fit little locked memory, and reading one overlaps the last one's copy.

A part is a range of the layer's flat buffer. It holds pieces of the checkpoint's tensors, in the form that they are
computed in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from offload.checkpoint import FileRange, TensorEntry
from offload.layer_store import LayerRecord, LayerStore, joined, sample_of


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShare:
    """The numbers of one of the checkpoint's tensors that belong to a part."""

    entry: TensorEntry
    dtype: torch.dtype  # they are computed in
    first: int  # number of the tensor
    end: int
    to: int  # byte of the part where the first number begins

    @property
    def num_bytes(self) -> int:
        """The bytes in the part."""
        return (self.end - self.first) * self.dtype.itemsize

    @property
    def file_range(self) -> FileRange:
        """The bytes of the file."""
        return self.entry.file_range(self.first, self.end)


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
        return joined(share.file_range for share in self.shares)

    def read(self, store: LayerStore, memory: Tensor) -> None:
        """Bring the part from mapped pages into uint8 memory; raises StreamError."""
        store.populate_ranges(self.ranges)
        for share in self.shares:
            place = memory[share.to : share.to + share.num_bytes].view(share.dtype)
            place.copy_(store.numbers(share.entry, share.first, share.end))
        store.drop_ranges(self.ranges)

    def add_samples(self, memory: Tensor, samples: dict[TensorEntry, bytes]) -> None:
        """Append to each tensor's sample what of it lies in the memory that the part was read into."""
        for share in self.shares:
            itemsize = share.dtype.itemsize
            first, end = sample_of(math.prod(share.entry.shape) * itemsize)
            before = share.first * itemsize
            found = memory[share.to + max(0, first - before) : share.to + min(end - before, share.num_bytes)]
            if first < share.end * itemsize and end > before:
                samples[share.entry] = samples.get(share.entry, b"") + found.numpy().tobytes()


def parts_of(record: LayerRecord, part_bytes: int) -> tuple[LayerPart, ...]:
    """Return the layer in parts of `part_bytes`, a multiple of the alignment; the last part may be smaller."""
    starts = range(0, record.flat_bytes, part_bytes)
    shares: list[list[TensorShare]] = [[] for _ in starts]
    for entry, dtype, begin in record.flat_places:
        stop = begin + math.prod(entry.shape) * dtype.itemsize
        for start in range(begin // part_bytes * part_bytes, stop, part_bytes):
            first, end = max(begin, start), min(stop, start + part_bytes)
            shares[start // part_bytes].append(
                TensorShare(
                    entry=entry,
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
