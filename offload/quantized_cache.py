"""Quantised layers on disk: made once, found again by what they were made from.

A folder holds one file a layer. It is written under another name and renamed when complete, under
a lock that the system releases when a process dies: whoever comes second waits and finds the
result, and what a killed process left is removed by the next one.
"""

from __future__ import annotations

import errno
import hashlib
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from filelock import FileLock
from safetensors import SafetensorError
from safetensors.torch import save_file

from offload.checkpoint import Checkpoint, TensorEntry, read_header
from offload.errors import CheckpointError
from offload.layer_store import SAMPLE_BYTES, LayerStore
from offload.quantize import outside_tensors, quantize_layer, quantized_checkpoint
from offload.skeleton import Skeleton

LAYOUT_VERSION = "1"  # of what the files hold: another one is another key
SPARE_BYTES = 64 << 20  # left free on the disk

Progress = Callable[[int, int], None]  # layers done, layers in all
Announce = Callable[[Path, int, int], None]  # folder, bytes to be written, bytes free


def load_or_quantize(
    skeleton: Skeleton,
    checkpoint: Checkpoint,
    quant: str,
    *,
    cache_folder: Path,
    device: torch.device,
    announce: Announce | None = None,
    progress: Progress | None = None,
) -> Checkpoint:
    """The checkpoint with its layers quantised, from the cache or into it; peak memory is one layer.

    Raises CheckpointError when the disk is too small or cannot be written.
    """
    folder = cache_folder / "quantized" / f"{checkpoint.folder.name}-{quant}-{_key(checkpoint, quant)}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if not folder.exists():
            with FileLock(f"{folder}.lock"):
                if not folder.exists():
                    _write(skeleton, checkpoint, quant, folder, device, announce, progress)
        entries: dict[str, TensorEntry] = {}
        for index in range(len(skeleton.records)):
            entries |= read_header(folder / _file_name(index))
    except (OSError, SafetensorError) as error:  # safetensors words a full disk in its own way
        raise CheckpointError(
            "E_CACHE",
            f"quantised weights cannot be kept in '{folder}' ({error}).",
            "Free some space, or set EDGESPEC_CACHE to a folder on another disk.",
        ) from error
    return Checkpoint(folder=checkpoint.folder, tensors={**outside_tensors(skeleton), **entries})


def _file_name(layer: int) -> str:
    return f"layer-{layer:05d}.safetensors"


def _key(checkpoint: Checkpoint, quant: str) -> str:
    """A digest of the setting, of every tensor's name, place and shape, and of a sample of its bytes."""
    digest = hashlib.sha256(f"{LAYOUT_VERSION} {quant}".encode())
    with ExitStack() as stack:
        files = {
            path: stack.enter_context(path.open("rb")) for path in {entry.file for entry in checkpoint.tensors.values()}
        }
        for name, entry in sorted(checkpoint.tensors.items()):
            digest.update(f"{name} {entry.dtype} {entry.shape} {entry.offset}".encode())
            for place in (0, entry.num_bytes // 2, max(0, entry.num_bytes - SAMPLE_BYTES)):
                files[entry.file].seek(entry.offset + place)
                digest.update(files[entry.file].read(min(SAMPLE_BYTES, entry.num_bytes - place)))
    return digest.hexdigest()[:16]


def _write(
    skeleton: Skeleton,
    checkpoint: Checkpoint,
    quant: str,
    folder: Path,
    device: torch.device,
    announce: Announce | None,
    progress: Progress | None,
) -> None:
    """All layers into a partial folder, then the folder under its own name. The lock is held."""
    planned = quantized_checkpoint(skeleton, checkpoint, quant)
    num_bytes = sum(entry.num_bytes for entry in planned.tensors.values() if not entry.file.name)
    free_bytes = shutil.disk_usage(folder.parent).free
    if announce:
        announce(folder, num_bytes, free_bytes)
    if num_bytes + SPARE_BYTES > free_bytes:
        raise OSError(errno.ENOSPC, f"{num_bytes} bytes are to be written, {free_bytes} are free")
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed: nobody else holds the lock
    partial.mkdir()
    try:
        store = LayerStore({entry.file for record in skeleton.records for entry in record.entries})
        for record in skeleton.records:
            save_file(quantize_layer(skeleton, record, store, quant, device), partial / _file_name(record.index))
            if progress:
                progress(record.index + 1, len(skeleton.records))
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
