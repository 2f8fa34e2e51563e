"""Where a decoder layer's weights lie on the host, as views of the checkpoint's own files.

A `LayerRecord` names a layer's tensors; a `LayerStore` maps the files and hands out zero-copy
views of a record. Reading ahead and letting go are done per contiguous range, because safetensors
files keep a layer's tensors together and one large read is what disks are good at.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from offload.checkpoint import TensorEntry
from offload.errors import StreamError
from offload.pages import MappedFile

ALIGNMENT_BYTES = 256  # of every tensor inside a flat buffer: what CUDA copies and kernels like best


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRecord:
    """One decoder layer: parameter name -> where it is stored, and the dtype it is computed in."""

    index: int
    entries: dict[str, TensorEntry]
    dtypes: dict[str, torch.dtype]

    @property
    def stored_bytes(self) -> int:
        """Bytes in the checkpoint: what a pass has to read."""
        return sum(entry.num_bytes for entry in self.entries.values())

    @property
    def flat_bytes(self) -> int:
        """Bytes of the flat buffer that holds the layer in its compute dtypes."""
        return sum(
            _aligned(entry.num_bytes // entry.dtype.itemsize * self.dtypes[name].itemsize)
            for name, entry in self.entries.items()
        )

    @property
    def is_converted(self) -> bool:
        """Whether a stored tensor has to change its dtype before it can be computed with."""
        return any(entry.dtype != self.dtypes[name] for name, entry in self.entries.items())

    def flat_views(self, flat: Tensor) -> dict[str, Tensor]:
        """The layer's parameters as views of a flat uint8 buffer of `flat_bytes` bytes."""
        views, offset = {}, 0
        for name, entry in self.entries.items():
            dtype = self.dtypes[name]
            num_bytes = entry.num_bytes // entry.dtype.itemsize * dtype.itemsize
            views[name] = flat[offset : offset + num_bytes].view(dtype).view(entry.shape)
            offset += _aligned(num_bytes)
        return views


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class LayerStore:
    """The mapped files of one checkpoint."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._files = {path: MappedFile(path) for path in files}

    def view(self, entry: TensorEntry) -> Tensor:
        """The tensor as it lies in the file; its pages load when they are touched."""
        data = self._files[entry.file].bytes[entry.offset : entry.offset + entry.num_bytes]
        if entry.offset % entry.dtype.itemsize:
            data = data.clone()  # torch cannot view bytes at an odd address as wider numbers
        return data.view(entry.dtype).view(entry.shape)

    def views(self, record: LayerRecord) -> dict[str, Tensor]:
        """All tensors of a layer, zero-copy."""
        return {name: self.view(entry) for name, entry in record.entries.items()}

    def populate(self, entries: Iterable[TensorEntry]) -> None:
        """Read the tensors' bytes into memory; raises StreamError with the file's name."""
        for path, start, end in _ranges(entries):
            file = self._files[path]
            try:
                file.check_length(end)
                file.populate(start, end)
            except OSError as error:
                raise StreamError(
                    "E_READ_FAILED",
                    f"reading weights failed: {error}.",
                    "Restore the file; the next prompt reads it again.",
                ) from error

    def announce(self, entries: Iterable[TensorEntry]) -> None:
        """Let the disk start on the tensors' bytes without waiting for them."""
        for path, start, end in _ranges(entries):
            self._files[path].announce(start, end)

    def drop(self, entries: Iterable[TensorEntry]) -> None:
        """Let the tensors' pages go."""
        for path, start, end in _ranges(entries):
            self._files[path].drop(start, end)


def _ranges(entries: Iterable[TensorEntry]) -> list[tuple[Path, int, int]]:
    """The byte ranges the entries cover, neighbours joined, in file order."""
    joined: list[tuple[Path, int, int]] = []
    for entry in sorted(entries, key=lambda entry: (str(entry.file), entry.offset)):
        end = entry.offset + entry.num_bytes
        if joined and joined[-1][0] == entry.file and entry.offset - joined[-1][2] < ALIGNMENT_BYTES:
            joined[-1] = (entry.file, joined[-1][1], end)
        else:
            joined.append((entry.file, entry.offset, end))
    return joined
