"""The tensors that a draft which borrows from its target would have, known from its config alone."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PretrainedConfig

from edgespec.draft.own_parts import OwnParts
from offload.checkpoint import Checkpoint, TensorEntry
from offload.skeleton import build_on_meta, lent_names, stored_buffers


def planned_parts(layer: PretrainedConfig, parts: OwnParts, folder: Path) -> Checkpoint:
    """Return the tensors that a draft of this config would have."""
    dtype = layer.dtype if isinstance(layer.dtype, torch.dtype) else torch.bfloat16
    model = build_on_meta(layer, folder, dtype=dtype)
    parts.attach(model)
    lent = lent_names(model, parts.modules)
    own = {**dict(model.named_parameters()), **stored_buffers(model)}
    return Checkpoint(
        folder=folder,
        tensors={
            name: TensorEntry.planned(name, tuple(tensor.shape), tensor.dtype)
            for name, tensor in own.items()
            if name not in lent
        },
    )
