"""A checkpoint whose files are not there: the tensors that a configuration would have, with their sizes."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PretrainedConfig

from offload.checkpoint import Checkpoint, TensorEntry
from offload.skeleton import build_on_meta, stored_buffers


def architecture_checkpoint(config: PretrainedConfig, folder: Path) -> Checkpoint:
    """Return names, shapes and sizes from the architecture alone, in the dtype that the configuration names."""
    stored = config.get_text_config(decoder=True).dtype
    dtype = stored if isinstance(stored, torch.dtype) else torch.bfloat16
    model = build_on_meta(config, folder, dtype=dtype)
    tensors = {}
    for name, tensor in [*model.named_parameters(), *stored_buffers(model).items()]:
        tensors[name] = TensorEntry(
            name=name, dtype=tensor.dtype, shape=tuple(tensor.shape), file=Path(), offset=0, num_bytes=tensor.nbytes
        )
    return Checkpoint(folder=folder, tensors=tensors)
