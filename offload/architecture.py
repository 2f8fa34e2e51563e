"""A checkpoint whose files are not there: the tensors that a configuration would have, with their sizes."""

from pathlib import Path

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from transformers import PretrainedConfig, PreTrainedModel

from offload.checkpoint import Checkpoint, TensorEntry
from offload.formats.planned import planned_parts
from offload.formats.stated import stated_packing
from offload.skeleton import build_on_meta, stored_buffers


def architecture_checkpoint(config: PretrainedConfig, folder: Path) -> Checkpoint:
    """Return names, shapes and sizes from the architecture alone, in the dtype that the configuration names.

    Packed weights have the parts that the configuration states. Raises CheckpointError where it does not say them.
    """
    stated = stated_packing(config)
    stored = config.get_text_config(decoder=True).dtype
    dtype = stored if isinstance(stored, torch.dtype) else torch.bfloat16
    model = build_on_meta(config, folder, dtype=dtype)
    tensors = {}
    for name, tensor in [*model.named_parameters(), *stored_buffers(model).items()]:
        plain = {name: (tuple(tensor.shape), tensor.dtype)}
        parts = planned_parts(name, tuple(tensor.shape), stated) if _may_be_packed(model, name) else {}
        for stored_name, facts in (parts or plain).items():
            tensors[stored_name] = TensorEntry.planned(stored_name, *facts)
    return Checkpoint(folder=folder, tensors=tensors)


def _may_be_packed(model: PreTrainedModel, name: str) -> bool:
    """Return whether formats pack such a tensor: a linear layer's weight, but the head's, or experts in one."""
    path, _, attribute = name.rpartition(".")
    module = model.get_submodule(path)
    if isinstance(module, nn.Linear):
        return attribute == "weight" and module is not model.get_output_embeddings()
    return getattr(module, attribute).ndim == 3 and not isinstance(module, _ConvNd)
