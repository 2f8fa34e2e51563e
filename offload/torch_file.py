"""The tensors of a `pytorch_model.bin`, known from its pickle alone: where each lies in the file, and no number.

torch reads the pickle with `weights_only`, so that no code of a file runs, and under a mode in which tensors hold
nothing. Its archives are not compressed: a tensor's bytes lie in the file as they are.
"""

from pathlib import Path

import torch
from torch import Tensor

from offload.checkpoint import TensorEntry
from offload.errors import CheckpointError
from offload.lfs_pointer import is_pointer, pointer_error

TORCH_NAME = "pytorch_model.bin"


def read_torch_file(path: Path) -> dict[str, TensorEntry]:
    """Return the tensors of a file that torch has saved; raises CheckpointError where it holds anything else."""
    if is_pointer(path):
        raise pointer_error(path)
    from torch._subclasses.fake_tensor import FakeTensorMode  # takes a second to load, for a rare kind of file

    try:
        with FakeTensorMode():
            found = torch.load(path, map_location="cpu", weights_only=True)
        entries = {name: _entry(name, tensor, path) for name, tensor in found.items()}
    except Exception as error:  # a damaged archive, code in a pickle and other objects all look different
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        what = f"'{path}' is no file of tensors alone, saved by torch in its present form ({reason})."
        fix = "Convert it to safetensors, or download the file again."
        raise CheckpointError("E_SHARD_INVALID", what, fix) from error
    end = max((entry.offset + entry.num_bytes for entry in entries.values()), default=0)
    if end > path.stat().st_size:
        raise CheckpointError("E_SHARD_TRUNCATED", f"'{path}' is truncated.", "Download the file again.")
    return entries


def _entry(name: str, tensor: Tensor, path: Path) -> TensorEntry:
    if not tensor.is_contiguous():
        raise ValueError(f"the numbers of '{name}' do not follow each other")
    offset = int(tensor.untyped_storage()._checkpoint_offset or 0)
    offset += int(tensor.storage_offset()) * tensor.dtype.itemsize
    shape = tuple(tensor.shape)
    return TensorEntry(name=name, dtype=tensor.dtype, shape=shape, file=path, offset=offset, num_bytes=tensor.nbytes)
