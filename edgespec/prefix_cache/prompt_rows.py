"""An open file of a prompt's rows: header and rows are of one file, even if another has its name by now.

It is read, not mapped: touching mapped pages of a file that somebody cuts would end the process.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from torch import Tensor

from edgespec.model.mechanisms.state_cache import STARTS, Window
from edgespec.prefix_cache.prompt_files import HEADER
from edgespec.validation import parse_json

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
PREFIX_BYTES = 8  # its length, in front of it
DTYPES = {"I64": torch.int64, "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class _RowPlace:
    """Where a tensor lies in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # bytes from the file's start


class PromptRows:
    """The file; what is wrong with it raises OSError, or an error that reading JSON and what it holds can end in."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.num_bytes = os.fstat(file.fileno()).st_size
        self.identity = self._identity()
        fields = parse_json(self.identity[1])
        self.content: Any = parse_json(fields.pop("__metadata__", {}).get(HEADER, "null"))
        start = PREFIX_BYTES + len(self.identity[1])
        self._places = {name: _place(field, start, num_bytes=self.num_bytes) for name, field in fields.items()}

    def beginning(self, role: str, count: int, device: torch.device) -> Callable[[str], Tensor | None]:
        """Return a function that reads the first rows of a model's tensor by its name; None where there is none.

        States come whole. One at a time: all of them together would take as much memory as the cache that they fill.
        """

        def read(name: str) -> Tensor | None:
            is_state, name = name.startswith("state."), f"{role}.{name}"
            return self.first(name, None if is_state else count).to(device) if name in self._places else None

        return read

    def windows(self, role: str) -> dict[str, Window]:
        """Return the lengths that a model's states can be cut to, by the states' keys."""
        return windows_of(role, self._places, self.first)

    def first(self, name: str, count: int | None = None) -> Tensor:
        """Return the first `count` rows of a tensor, or all."""
        place = self._places[name]
        shape = place.shape if count is None else (min(count, place.shape[0]), *place.shape[1:])
        rows = torch.empty(shape, dtype=place.dtype)
        memory = rows.view(-1).view(torch.uint8).numpy()
        self._file.seek(place.offset)
        if self._file.readinto(memory.data) != memory.nbytes:  # type: ignore[attr-defined]
            raise ValueError("it is cut")
        return rows

    def digest(self) -> str:
        """Return the digest of the ids that the file states and of all that it holds."""
        layout = {name: (place.dtype, place.shape) for name, place in self._places.items()}
        return _digest(self.content["ids"], layout, (self.first(name) for name in sorted(layout)))

    def check_unchanged(self) -> None:
        """Raise ValueError where the file was written to since it was opened."""
        if self._identity() != self.identity:
            raise ValueError("it is being written to")

    def _identity(self) -> tuple[tuple[int, ...], bytes]:
        """Return what identifies the file as it is now; overwriting changes it. It includes the header."""
        found = os.fstat(self._file.fileno())
        self._file.seek(0)
        num_bytes = int.from_bytes(self._file.read(PREFIX_BYTES), "little")
        if num_bytes > min(MAX_HEADER_BYTES, found.st_size - PREFIX_BYTES):
            raise ValueError("it has no header")
        place = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
        return place, self._file.read(num_bytes)


def windows_of(role: str, names: Iterable[str], read: Callable[[str], Tensor]) -> dict[str, Window]:
    """Return the lengths that a model's states can be cut to, by their keys; `read` gives tensors by these names."""
    start, end = f"{role}.state.", f".{STARTS}"
    found = [name for name in names if name.startswith(start) and name.endswith(end)]
    return {name.removeprefix(start).removesuffix(end): Window(*read(name).tolist()) for name in found}


def digest_of(ids: Mapping[str, list[int]], tensors: Mapping[str, Tensor]) -> str:
    """Return the digest of a file of these ids and tensors."""
    layout = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    return _digest(ids, layout, (tensors[name] for name in sorted(tensors)))


def _digest(
    ids: Mapping[str, list[int]], layout: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], rows: Iterable[Tensor]
) -> str:
    facts = {name: [str(dtype), list(shape)] for name, (dtype, shape) in layout.items()}
    digest = hashlib.blake2b(json.dumps([ids, facts], sort_keys=True).encode(), digest_size=16)
    for tensor in rows:
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _place(field: dict[str, Any], start: int, *, num_bytes: int) -> _RowPlace:
    """Return where a tensor lies in a file of `num_bytes` bytes, whose tensors start at `start`."""
    dtype, shape = DTYPES[field["dtype"]], tuple(field["shape"])
    begin, end = field["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        raise ValueError("its header is damaged")
    if not shape or end - begin != math.prod(shape) * dtype.itemsize or start + end > num_bytes:
        raise ValueError("it is cut, or its header is damaged")
    return _RowPlace(dtype=dtype, shape=shape, offset=start + begin)
