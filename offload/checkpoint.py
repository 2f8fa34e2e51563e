"""The tensors of a Hugging Face folder, known from headers alone.

`read_checkpoint` finds the safetensors files, checks that each is whole, and returns where every tensor lies.
It reads a few kilobytes per shard and no weight: the safetensors library gives no byte offsets, which views need.
"""

from __future__ import annotations

import json
import math
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from offload.errors import CheckpointError
from offload.file_names import ADAPTER_NAME, INDEX_NAME, SINGLE_NAME
from offload.lfs_pointer import is_pointer, pointer_error

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
NUM_SHARDS_NAMED = 4  # of those that are missing
MAX_SHOWN = 100  # characters of the name of one
NUMBERED = re.compile(r"(.+)\[(\d+)\]")
FileRange = tuple[Path, int, int]  # file, its bytes from the first up to the second
_SINGLE: dict[str, set[str]] = {SINGLE_NAME: set()}

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,  # powers of two: scales
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def parse_json(text: str | bytes) -> Any:
    """Return what JSON says; raises ValueError for all that is none, lists in lists without end among it."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


class StorageType(Protocol):
    """How the bytes of a tensor become a parameter's numbers, which are computed once, when it is loaded."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's shape."""

    def write(self, stored: Tensor, out: Tensor) -> None:
        """Write the numbers of uint8 [bytes] to `out` [numbers], computed in float32 and rounded once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """The place of one tensor: its file, offset and type."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    offset: int  # bytes from the start of the file
    num_bytes: int
    is_transposed: bool = False  # the parameter has the last two dimensions exchanged
    is_in_turn: bool = False  # the parameter has its rows and those of the next tensor in turn
    every: int = 1  # the file has so many rows for each of its own: those between are another tensor's
    computed: StorageType | None = None  # of numbers that are computed from the stored bytes

    @classmethod
    def planned(cls, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> TensorEntry:
        """Return the entry of a tensor that no file holds."""
        num_bytes = math.prod(shape) * dtype.itemsize
        return cls(name=name, dtype=dtype, shape=shape, file=Path(), offset=0, num_bytes=num_bytes)

    @property
    def is_planned(self) -> bool:
        """Return whether no file holds the tensor."""
        return not self.file.name

    def place(self, number: int) -> int:
        """Return the offset in the file of one of the tensor's numbers."""
        if self.every > 1:
            number += number // self.shape[-1] * (self.every - 1) * self.shape[-1]
        return self.offset + number * self.dtype.itemsize

    def file_range(self, first: int, end: int) -> FileRange:
        """Return the bytes of the file that hold the numbers from the first up to the second."""
        return self.file, self.place(first), self.place(end - 1) + self.dtype.itemsize

    @property
    def parameter_shape(self) -> tuple[int, ...]:
        """The shape of the parameter that is stored here alone."""
        if self.computed is not None:
            return self.computed.shape
        return (*self.shape[:-2], *self.shape[:-3:-1]) if self.is_transposed else self.shape


Pieces = tuple[TensorEntry, ...]  # that make up a parameter, in the order in which they lie in it


def split_number(name: str) -> tuple[str, int | None]:
    """Return a tensor's name without the number behind it, and that number."""
    found = NUMBERED.fullmatch(name)
    return (found[1], int(found[2])) if found else (name, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A folder's tensors by name."""

    folder: Path
    tensors: dict[str, TensorEntry]
    is_index_unused: bool = False  # an index lies beside the single file, which comes first, as in transformers

    @property
    def num_bytes(self) -> int:
        """The bytes of all tensors together."""
        return sum(entry.num_bytes for entry in self.tensors.values())

    @property
    def files(self) -> list[Path]:
        """The files that tensors lie in; none where headers or a config.json are all that is here."""
        files = sorted({entry.file for entry in self.tensors.values()})
        return [path for path in files if path.name and path.exists()]


def read_checkpoint(folder: Path) -> Checkpoint:
    """Return all tensors of the folder's safetensors files; raises CheckpointError when one is not usable."""
    if folder.is_file():
        fix = "Give the folder with config.json and *.safetensors, or a GGUF file."
        raise CheckpointError("E_MODEL_NOT_FOUND", f"'{folder}' is a file, not a model's folder.", fix)
    if not folder.is_dir():
        fix = "Give the folder of a downloaded Hugging Face model: one with config.json and *.safetensors."
        raise CheckpointError("E_MODEL_NOT_FOUND", f"there is no folder '{folder}'.", fix)
    if (folder / ADAPTER_NAME).is_file():
        raise _adapter(folder)
    shards = _shard_names(folder)
    paths = {shard: _shard_path(folder, shard) for shard in shards}
    _check_all_there(folder, paths)
    tensors: dict[str, TensorEntry] = {}
    for shard, expected in shards.items():
        entries = read_header(paths[shard])
        missing = sorted(expected - entries.keys())
        if missing:
            what = f"{shard} in '{folder}' lacks {len(missing)} tensors that {INDEX_NAME} lists, '{missing[0]}' first."
            raise CheckpointError("E_SHARD_INCOMPLETE", what, "Download the model again.")
        tensors |= entries
    is_index_unused = shards == _SINGLE and (folder / INDEX_NAME).exists()
    return Checkpoint(folder=folder, tensors=tensors, is_index_unused=is_index_unused)


def _shard_names(folder: Path) -> dict[str, set[str]]:
    """Return file name -> the tensors that the index promises in it (none for a single file)."""
    index, single = folder / INDEX_NAME, folder / SINGLE_NAME
    if single.is_file():
        return _SINGLE
    if index.exists():
        try:
            weight_map = parse_json(index.read_bytes())["weight_map"]
            shards: dict[str, set[str]] = {}
            for tensor, shard in weight_map.items():
                if not isinstance(shard, str):
                    raise TypeError(f"the shard of '{tensor}' is no name")
                shards.setdefault(shard, set()).add(tensor)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            if is_pointer(index):
                raise pointer_error(index) from error
            raise CheckpointError(
                "E_INDEX_INVALID", f"'{index}' is not a valid index ({error!r}).", "Download the model again."
            ) from error
        return shards
    if single.is_symlink():  # it leads nowhere
        return _SINGLE
    raise _no_safetensors(folder)


def _adapter(folder: Path) -> CheckpointError:
    """Return the error of an adapter: transformers puts it on its base, also where whole weights lie beside it."""
    try:
        base = parse_json((folder / ADAPTER_NAME).read_bytes())["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        base = None
    named = f"'{base[:MAX_SHOWN]}'" if isinstance(base, str) and base else "a base model"
    has_weights = any((folder / name).exists() for name in (SINGLE_NAME, INDEX_NAME))
    return CheckpointError(
        "E_ADAPTER",
        f"'{folder}' holds an adapter of {named} ({ADAPTER_NAME})"
        + (", beside whole weights that it is no part of." if has_weights else ", and no whole model."),
        "Give its model as the target, and the folder with `adapters`."
        + (f" Without it, remove {ADAPTER_NAME}." if has_weights else ""),
    )


def _no_safetensors(folder: Path) -> CheckpointError:
    """Return the error that names the files in the folder instead, and the fix."""
    names = sorted(path.name for path in folder.iterdir())
    suffixes = {Path(name).suffix.lower(): name for name in reversed(names)}
    if ".gguf" in suffixes:
        return CheckpointError(
            "E_NO_SAFETENSORS",
            f"'{folder}' holds GGUF files ({suffixes['.gguf']} ...) and no safetensors.",
            "Give one of the files; of a model in parts, any of them.",
        )
    other = next((suffixes[suffix] for suffix in (".bin", ".pt", ".pth") if suffix in suffixes), None)
    if other is not None:
        return CheckpointError(
            "E_NO_SAFETENSORS",
            f"'{folder}' has no {SINGLE_NAME}; its weights are in the older format of {other}.",
            "Convert them once, in Python with transformers: "
            "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER); copy the tokenizer's files.",
        )
    found = f" It holds {suffixes['.safetensors']}, which no index names." if ".safetensors" in suffixes else ""
    return CheckpointError(
        "E_NO_SAFETENSORS",
        f"'{folder}' has no {SINGLE_NAME} and no {INDEX_NAME}.{found}",
        "Give the folder of a model that is published as safetensors, or a GGUF file.",
    )


def _check_all_there(folder: Path, paths: dict[str, Path]) -> None:
    """Raise CheckpointError that names the shards that are not in the folder."""
    missing = sorted(shard[:MAX_SHOWN] for shard, path in paths.items() if not _is_file(path))
    if not missing:
        return
    more = f" and {len(missing) - NUM_SHARDS_NAMED} more" if len(missing) > NUM_SHARDS_NAMED else ""
    repository = folder.parent.parent.name  # of a snapshot in the Hugging Face cache: models--OWNER--NAME
    name = repository.removeprefix("models--").replace("--", "/")
    known = folder.parent.name == "snapshots" and repository.startswith("models--") and "/" in name
    raise CheckpointError(
        "E_SHARD_MISSING",
        f"{len(missing)} of {len(paths)} shards are missing from '{folder}': "
        f"{', '.join(missing[:NUM_SHARDS_NAMED])}{more}.",
        f"Finish the download: hf download {name}." if known else "Download the missing files.",
    )


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that no file can have
        return False


def _shard_path(folder: Path, shard: str) -> Path:
    """Return the shard's path, which is refused when its name leads out of the folder."""
    path = folder / shard
    # Compared before links are followed: a Hugging Face cache snapshot consists of links into ../../blobs.
    if Path(shard).is_absolute() or ".." in Path(shard).parts or "\\" in shard or not shard:
        what = f"{INDEX_NAME} in '{folder}' names a shard outside the folder: '{shard}'."
        raise CheckpointError("E_SHARD_OUTSIDE", what, "Do not use this checkpoint, or correct its index.")
    return path


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Return the tensors of one safetensors file, after checking that it is as long as its header says."""
    if is_pointer(path):
        raise pointer_error(path)
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else MAX_HEADER_BYTES + 1
            if header_bytes > min(MAX_HEADER_BYTES, file_bytes - 8):
                raise _truncated(path, f"its {file_bytes} bytes cannot hold its header")
            header = file.read(header_bytes)
        data_start = 8 + header_bytes
        fields: dict[str, Any] = parse_json(header)
        fields.pop("__metadata__", None)
        entries = {name: _entry(name, field, path, data_start) for name, field in fields.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            "E_SHARD_INVALID", f"'{path}' is not a valid safetensors file ({error}).", "Download the file again."
        ) from error
    end = max((entry.offset + entry.num_bytes for entry in entries.values()), default=data_start)
    if end > file_bytes:
        raise _truncated(path, f"it has {file_bytes} bytes of the {end} that its header lists")
    return entries


def _truncated(path: Path, reason: str) -> CheckpointError:
    return CheckpointError("E_SHARD_TRUNCATED", f"'{path}' is truncated: {reason}.", "Download the file again.")


def _entry(name: str, field: dict[str, Any], path: Path, data_start: int) -> TensorEntry:
    start, end = field["data_offsets"]
    shape = tuple(field["shape"])
    if not all(type(number) is int for number in (start, end, *shape)) or any(size < 0 for size in shape):
        raise ValueError(f"tensor '{name}' has offsets or sizes that are no whole numbers")
    if field["dtype"] not in DTYPES:
        raise ValueError(f"tensor '{name}' is of {field['dtype']}, which is none of {', '.join(DTYPES)}")
    dtype = DTYPES[field["dtype"]]
    if start < 0 or end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"tensor '{name}' has {end - start} bytes for shape {list(shape)} of {field['dtype']}")
    return TensorEntry(name=name, dtype=dtype, shape=shape, file=path, offset=data_start + start, num_bytes=end - start)
