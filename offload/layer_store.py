"""The place of a decoder layer's weights on the host: views of the checkpoint's own files.

A `LayerRecord` names a layer's tensors; a `LayerStore` maps the files and hands out zero-copy views of a record.
Reading ahead and letting go are done per contiguous range: files keep a layer's tensors together.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from offload.checkpoint import FileRange, TensorEntry
from offload.errors import StreamError, read_errors
from offload.file_state import is_settled
from offload.pages import MappedFile

ALIGNMENT_BYTES = 256  # of every tensor inside a flat buffer: what CUDA copies and kernels like best
SAMPLE_BYTES = 64  # of each tensor, looked at on every read

RecordKey = tuple[int, int | None]  # layer, expert


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A parameter, and the tensors of the checkpoint that make it up: several where experts are fused.

    The pieces follow each other in memory, row-major; one that is transposed is a view of its memory.
    """

    pieces: tuple[TensorEntry, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype  # it is computed in

    @property
    def num_bytes(self) -> int:
        """The parameter's bytes in the compute dtype."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_mappable(self) -> bool:
        """Return whether the file's own bytes can be computed with."""
        return len(self.pieces) == 1 and self.pieces[0].dtype == self.dtype and self.pieces[0].every == 1

    def parameter(self, memory: Tensor) -> Tensor:
        """Return the parameter as a view of the memory that holds its pieces."""
        if self.pieces[0].is_transposed:
            return memory.view(*self.shape[:-2], *self.shape[:-3:-1]).mT
        return memory.view(self.shape)


@dataclass(frozen=True, kw_only=True)
class LayerRecord:
    """The record of one decoder layer, or of one of its experts: parameter name -> where it is stored."""

    index: int
    tensors: dict[str, StoredTensor]
    expert: int | None = None

    @property
    def key(self) -> RecordKey:
        """The key of a record among those of one model."""
        return self.index, self.expert

    @cached_property
    def entries(self) -> tuple[TensorEntry, ...]:
        """The checkpoint's tensors that the layer is made of."""
        return tuple(piece for tensor in self.tensors.values() for piece in tensor.pieces)

    @cached_property
    def ranges(self) -> tuple[FileRange, ...]:
        """The byte ranges of the files that hold the layer."""
        return joined(entry.file_range(0, math.prod(entry.shape)) for entry in self.entries)

    @cached_property
    def stored_bytes(self) -> int:
        """The layer's bytes in the checkpoint, which a pass has to read."""
        return sum(entry.num_bytes for entry in self.entries)

    @cached_property
    def flat_bytes(self) -> int:
        """The bytes of the flat buffer that holds the layer in its compute dtypes."""
        return sum(_aligned(tensor.num_bytes) for tensor in self.tensors.values())

    @cached_property
    def copied(self) -> LayerRecord:
        """The part that has to be copied even on a CPU: its dtype changes, or several tensors make a parameter."""
        return self._part(is_mappable=False)

    @cached_property
    def mapped(self) -> LayerRecord:
        """The part that a CPU computes with where it lies in the file."""
        return self._part(is_mappable=True)

    @property
    def is_stored_as_computed(self) -> bool:
        """Return whether the bytes in the files are those of a flat buffer."""
        pieces = ((tensor, piece) for tensor in self.tensors.values() for piece in tensor.pieces)
        return all(one.dtype == tensor.dtype and not one.is_in_turn and one.every == 1 for tensor, one in pieces)

    @property
    def flat_places(self) -> Iterator[tuple[StoredTensor, int]]:
        """Yield the parameters, each with its offset in the flat buffer."""
        offset = 0
        for tensor in self.tensors.values():
            yield tensor, offset
            offset += _aligned(tensor.num_bytes)

    @property
    def cpu_bytes(self) -> int:
        """The bytes of the layer in a CPU's memory."""
        return self.copied.flat_bytes + self.mapped.stored_bytes

    def without(self, names: frozenset[str]) -> LayerRecord:
        """Return the record without these parameters."""
        tensors = {name: tensor for name, tensor in self.tensors.items() if name not in names}
        return LayerRecord(index=self.index, tensors=tensors, expert=self.expert)

    def _part(self, *, is_mappable: bool) -> LayerRecord:
        return self.without(frozenset(name for name, one in self.tensors.items() if one.is_mappable != is_mappable))

    def flat_views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the layer's parameters as views of a flat uint8 buffer of `flat_bytes` bytes."""
        return {
            name: tensor.parameter(flat[offset : offset + tensor.num_bytes].view(tensor.dtype))
            for name, (tensor, offset) in zip(self.tensors, self.flat_places, strict=True)
        }


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def joined(ranges: Iterable[FileRange]) -> tuple[FileRange, ...]:
    """Return ranges of files in their order, neighbours joined."""
    found: list[FileRange] = []
    for path, start, end in sorted(ranges, key=lambda one: (str(one[0]), one[1])):
        if found and found[-1][0] == path and start - found[-1][2] < ALIGNMENT_BYTES:
            found[-1] = (path, found[-1][1], max(found[-1][2], end))
        else:
            found.append((path, start, end))
    return tuple(found)


class LayerStore:
    """The mapped files of one checkpoint."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._files = {path: MappedFile(path) for path in files}
        self._samples: dict[RecordKey, int] = {}  # checksums of a few bytes of each of a record's tensors
        self._watched: dict[RecordKey, LayerRecord] = {}  # those that are computed with where they lie
        self._states = {path: file.state() for path, file in self._files.items()}  # at the last look

    def view(self, entry: TensorEntry) -> Tensor:
        """Return the tensor as it lies in the file; its pages load when they are touched."""
        numbers = self._between(entry, 0, math.prod(entry.shape))
        if entry.every > 1:
            columns = entry.shape[-1]
            numbers = numbers.as_strided((math.prod(entry.shape[:-1]), columns), (entry.every * columns, 1))
        return numbers.view(entry.shape)

    def numbers(self, entry: TensorEntry, first: int, end: int) -> Tensor:
        """Return a tensor's numbers from the first up to the second, in a row."""
        if entry.every == 1:
            return self._between(entry, first, end)
        columns = entry.shape[-1]
        rows = self.view(entry).view(-1, columns)[first // columns : -(-end // columns)]
        return rows.reshape(-1)[first % columns :][: end - first]

    def _between(self, entry: TensorEntry, first: int, end: int) -> Tensor:
        """Return what the file has from one of a tensor's numbers up to another: all of it, in a row."""
        path, start, stop = entry.file_range(first, end)
        data = self._files[path].bytes[start:stop]
        if entry.offset % entry.dtype.itemsize:
            data = data.clone()  # torch cannot view bytes at an odd address as wider numbers
        return data.view(entry.dtype)

    def views(self, record: LayerRecord) -> dict[str, Tensor]:
        """Return all tensors of a record that needs no copy, where they lie in the file."""
        return {name: tensor.parameter(self.view(tensor.pieces[0])) for name, tensor in record.tensors.items()}

    def pieces(self, record: LayerRecord) -> dict[str, list[Tensor]]:
        """Return the pieces of all tensors of a record, where they lie in the file."""
        return {name: [self.view(piece) for piece in tensor.pieces] for name, tensor in record.tensors.items()}

    def copy(self, record: LayerRecord, flat: Tensor) -> None:
        """Copy a layer into a flat buffer, in its compute dtypes."""
        for name, destination in record.flat_views(flat).items():
            pieces = record.tensors[name].pieces
            self._fill(pieces, (destination.mT if pieces[0].is_transposed else destination).view(-1))

    def assembled(self, tensor: StoredTensor, dtype: torch.dtype) -> Tensor:
        """Return a parameter in memory of its own."""
        return tensor.parameter(self.made(tensor, dtype))

    def made(self, tensor: StoredTensor, dtype: torch.dtype) -> Tensor:
        """Return a parameter's numbers in memory of their own, in a row."""
        self._fill(tensor.pieces, whole := torch.empty(math.prod(tensor.shape), dtype=dtype))
        return whole

    def _fill(self, pieces: tuple[TensorEntry, ...], whole: Tensor) -> None:
        """Write the numbers of a parameter's pieces to its memory."""
        done = 0
        for number, piece in enumerate(pieces):
            view, num_numbers = self.view(piece), math.prod(piece.parameter_shape)
            place = whole[number :: len(pieces)] if piece.is_in_turn else whole[done : done + num_numbers]
            place.view(view.shape).copy_(view) if piece.computed is None else piece.computed.write(view.view(-1), place)
            done += num_numbers

    def populate(self, record: LayerRecord, *, stays: bool = False) -> None:
        """Read the layer's bytes into memory, in large pages if it `stays`; raises StreamError with the file's name."""
        for path, start, end in record.mapped.ranges if stays else ():
            self._files[path].use_large_pages(start, end)
        self.populate_ranges(record.ranges)
        self.check_unchanged(record, self.mapped_samples(record))

    def populate_ranges(self, ranges: Iterable[FileRange]) -> None:
        """Read these bytes into memory; raises StreamError with the file's name."""
        for path, start, end in ranges:
            file = self._files[path]
            with read_errors():
                file.check_length(end)
                file.populate(start, end)

    def announce(self, ranges: Iterable[FileRange]) -> None:
        """Let the disk start on these bytes without waiting for them."""
        for path, start, end in ranges:
            self._files[path].announce(start, end)

    def drop(self, record: LayerRecord, *, from_cache: bool = False) -> None:
        """Let the layer's pages go, `from_cache` the system's as well."""
        self.drop_ranges(record.ranges, from_cache=from_cache)

    def drop_ranges(self, ranges: Iterable[FileRange], *, from_cache: bool = False) -> None:
        """Let the pages of these bytes go."""
        for path, start, end in ranges:
            self._files[path].drop(start, end, from_cache=from_cache)

    def watch(self, record: LayerRecord) -> None:
        """Let `check_watched` look after a record whose views stay in use once it is read."""
        self._watched[record.key] = record

    def unwatch(self, record: LayerRecord) -> None:
        """Look after a record no more: its views are out of use."""
        self._watched.pop(record.key, None)

    def check_watched(self) -> None:
        """Raise StreamError where weights in use were written over; unchanged files cost a look each."""
        if not self._watched:
            return
        states = {path: file.state() for path, file in self._files.items()}
        if states == self._states:
            return
        changed = {path for path, state in states.items() if state != self._states[path]}
        for record in list(self._watched.values()):
            if record.key in self._samples and not changed.isdisjoint(path for path, _, _ in record.ranges):
                for path, _, end in record.ranges:
                    with read_errors():
                        self._files[path].check_length(end)
                self.check_unchanged(record, self.mapped_samples(record))
        # Touched, or being written to from its other end
        self._states |= {path: states[path] for path in changed if is_settled(states[path])}

    def mapped_samples(self, record: LayerRecord) -> list[bytes]:
        """Return some bytes of each of a record's tensors, where its files are mapped."""
        return [
            self._files[entry.file].mapping[entry.offset + first : entry.offset + end]
            for entry in record.entries
            for first, end in [sample_of(entry.num_bytes)]
        ]

    def check_unchanged(self, record: LayerRecord, samples: Iterable[bytes]) -> None:
        """Raise StreamError when a file was written over: the model would be half of one and half of another.

        Of one record the samples have to be taken in the same way each time.
        """
        checksum = 0
        for sample in samples:
            checksum = zlib.crc32(sample, checksum)
        if self._samples.setdefault(record.key, checksum) != checksum:
            files = ", ".join(sorted({entry.file.name for entry in record.entries}))
            layer = f" of layer {record.index}" if record.index >= 0 else ""
            what = f"the weights{layer} in {files} were written over while in use."
            raise StreamError("E_FILE_CHANGED", what, "Restore the file, or start again to use the new weights.")


def sample_of(num_bytes: int) -> tuple[int, int]:
    """Return which of a tensor's bytes are looked at: from the first up to the second."""
    middle = num_bytes // 2
    return middle, min(middle + SAMPLE_BYTES, num_bytes)
