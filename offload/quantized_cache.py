"""Quantised layers on disk are made once, and found again by a key of their source.

A folder holds one file a layer. It is written under another name and renamed when complete, under
a lock that the system releases when a process dies: a second process waits and finds the
result, and the next one removes the files of a killed process.
"""

import errno
import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from offload.checkpoint import DTYPES, Checkpoint, TensorEntry, read_header
from offload.errors import CheckpointError
from offload.formats.storage import STATE
from offload.layer_store import SAMPLE_BYTES, LayerStore
from offload.layouts.known import layouts_in_files
from offload.quantize import quantize_layer, quantized_checkpoint, quantized_layout, tensors_left
from offload.skeleton import Skeleton
from profiles.disk_sync import sync_to_disk

logger = logging.getLogger("edgespec.offload")

LAYOUT_VERSION = "3"  # of the files: another one is another key
ALIGNMENT_BYTES = 64  # of tensors in a file: kernels take up to twice as long for mapped ones that straddle cache lines
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
    """Return the checkpoint with its layers quantised, read from the cache or written into it.

    Peak memory is one layer. Raises CheckpointError when the disk is too small or cannot be written.
    """
    folder = cache_folder / "quantized" / f"{quant}-{_key(checkpoint, quant)}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        entries = _read(skeleton, folder, quant)
        if entries is None:
            with _locked(folder):
                entries = _read(skeleton, folder, quant)  # the process that held the lock may have made it
                if entries is None:
                    _write(skeleton, checkpoint, quant, folder, device, announce, progress)
                    entries = _read(skeleton, folder, quant)
    except OSError as error:
        raise _unusable(folder, str(error)) from error
    if entries is None:
        raise _unusable(folder, "what was written reads back differently")
    return Checkpoint(folder=checkpoint.folder, tensors={**tensors_left(skeleton, checkpoint, quant), **entries})


def _unusable(folder: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        "E_CACHE",
        f"quantised weights cannot be kept in '{folder}' ({reason}).",
        "Free some space, or set EDGESPEC_CACHE to a folder on another disk.",
    )


def _locked(folder: Path) -> AbstractContextManager[object]:
    """Take the folder's lock, which the end of the context returned releases."""
    lock = FileLock(f"{folder}.lock")
    try:
        return lock.acquire(blocking=False)
    except Timeout:
        logger.warning("waiting for another process that is writing '%s'", folder)
        return lock.acquire()


def _read(skeleton: Skeleton, folder: Path, quant: str) -> dict[str, TensorEntry] | None:
    """Return the folder's tensors; None where there are none, or not those that belong there."""
    entries: dict[str, TensorEntry] = {}
    if not folder.exists():
        return None
    for record in skeleton.records:
        try:
            found = read_header(folder / _file_name(record.index))
        except (OSError, CheckpointError):
            return None
        layout = quantized_layout(skeleton, record, quant)
        if found.keys() != layout.keys() or any(
            facts not in (STATE, (found[name].shape, found[name].dtype)) for name, facts in layout.items()
        ):
            return None
        entries |= found
    return entries


def _file_name(layer: int) -> str:
    return f"layer-{layer:05d}.safetensors"


def _key(checkpoint: Checkpoint, quant: str) -> str:
    """Return a digest of the setting, of every tensor's name, place and shape, and of a sample of its bytes."""
    variants = (layout.own.variant for layout in layouts_in_files(quant))
    digest = hashlib.sha256(" ".join(filter(None, (LAYOUT_VERSION, quant, *variants))).encode())
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
    """Write all layers into a partial folder, then give it its own name. The lock is held."""
    partial = folder.with_name(f"{folder.name}.partial")
    for left_over in (partial, folder):  # of a process that was killed, or damaged since: the lock is ours
        shutil.rmtree(left_over, ignore_errors=True)
    planned = quantized_checkpoint(skeleton, checkpoint, quant)
    num_bytes = sum(entry.num_bytes for entry in planned.tensors.values() if entry.is_planned)
    free_bytes = shutil.disk_usage(folder.parent).free
    if announce:
        announce(folder, num_bytes, free_bytes)
    if num_bytes + SPARE_BYTES > free_bytes:
        raise OSError(errno.ENOSPC, f"{num_bytes} bytes are to be written, {free_bytes} are free")
    partial.mkdir()
    try:
        store = LayerStore({entry.file for record in skeleton.records for entry in record.entries})
        for record in skeleton.records:
            _save(quantize_layer(skeleton, record, store, quant, device), partial / _file_name(record.index))
            if progress:
                progress(record.index + 1, len(skeleton.records))
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the blocks fit nothing that comes next
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors on the host as a safetensors file, in which all begin at a multiple of ALIGNMENT_BYTES.

    Those whose length is no such multiple come last. safetensors itself writes a header of any length.
    """
    ordered = sorted(tensors.items(), key=lambda item: item[1].nbytes % ALIGNMENT_BYTES != 0)
    names = {dtype: name for name, dtype in DTYPES.items()}
    header, end = {}, 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT_BYTES)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        file.flush()
        sync_to_disk(file.fileno())  # or a power loss could leave a short file under the final name
