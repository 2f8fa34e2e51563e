"""Quantisation of a checkpoint's decoder layers, one layer at a time, from plain weights or from larger packed ones.

`quantized_layout` says which tensors come out and how large they are, from headers alone;
`quantize_layer` makes them. What comes out has the names and the form of checkpoints that are published
in the same format, so that a cached layer and such a checkpoint load the same way.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from offload.checkpoint import Checkpoint, TensorEntry
from offload.errors import CheckpointError
from offload.formats.known import format_to_pack
from offload.formats.packed_format import KeptWeight, Layouts, Packer, stored_layout
from offload.layer_store import LayerRecord, LayerStore, StoredTensor
from offload.packed_weight import PackedWeight
from offload.skeleton import Skeleton

LARGEST_SHARE = 0.75  # of packed layers' bytes that smaller ones may have: less saving is not worth the loss
NUM_EXPERT_DIMENSIONS = 3  # of the tensor of a layer's experts; the first one counts them
UNPACKED_DTYPE = torch.bfloat16  # of weights that were packed otherwise


def quantized_checkpoint(skeleton: Skeleton, checkpoint: Checkpoint, quant: str) -> Checkpoint:
    """Return the checkpoint as it will be once its layers are quantised.

    It has names, shapes and sizes, and no files. Raises CheckpointError when the checkpoint is packed as small already.
    """
    tensors = outside_tensors(skeleton)
    for record in skeleton.records:
        for name, facts in quantized_layout(skeleton, record, quant).items():
            tensors[name] = TensorEntry.planned(name, *facts)
    planned = Checkpoint(folder=checkpoint.folder, tensors=tensors)
    _check_smaller(skeleton, planned, quant)
    return planned


def outside_tensors(skeleton: Skeleton) -> dict[str, TensorEntry]:
    """Return the tensors outside the decoder layers, under their names in the checkpoint."""
    return {entry.name: entry for entry in skeleton.outside.entries}


def quantized_layout(skeleton: Skeleton, record: LayerRecord, quant: str) -> Layouts:
    """Return the tensors of one quantised layer; those whose entry is STATE may be of any length."""
    layout: Layouts = {}
    for name, stored in _weights(record).items():
        weight = skeleton.model.get_parameter(name)
        shape = tuple(weight.shape)
        if not _is_packed(skeleton, name, quant):
            layout[name] = (shape, stored[""].pieces[0].dtype if "" in stored else UNPACKED_DTYPE)
        else:
            kept = _kept(skeleton, name, quant)
            layout |= stored_layout(kept.packing if kept else _packer(quant, shape), name, shape)
    return layout


@torch.no_grad()
def quantize_layer(
    skeleton: Skeleton, record: LayerRecord, store: LayerStore, quant: str, device: torch.device
) -> dict[str, Tensor]:
    """Return the tensors of one quantised layer, on the host; they are computed on `device`."""
    store.populate(record)
    result: dict[str, Tensor] = {}
    for name, stored in _weights(record).items():
        parts = {part: _assembled(store, tensor) for part, tensor in stored.items()}
        kept = _kept(skeleton, name, quant)
        if kept is not None:
            result |= _stored(name, kept.packing, kept.repack(parts), tuple(skeleton.model.get_parameter(name).shape))
            continue
        whole = parts[""] if "" in parts else _unpacked(skeleton, name, parts, device)
        if not _is_packed(skeleton, name, quant):
            result[name] = whole.cpu().clone()  # a view of the file would be written from a page that may go
        else:
            result |= _packed(name, whole.to(device), _packer(quant, tuple(whole.shape)))
    store.drop(record)
    return result


def _weights(record: LayerRecord) -> dict[str, dict[str, StoredTensor]]:
    """Return parameter -> its parts; a plain one's only part has no name."""
    weights: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
    for name, tensor in record.tensors.items():
        parameter, _, part = name.rpartition("_packed.")
        weights[parameter or name][part if parameter else ""] = tensor
    return weights


def _kept(skeleton: Skeleton, name: str, quant: str) -> KeptWeight | None:
    """Return how a weight that the checkpoint has packed keeps its steps; None where it is rounded, or stays plain."""
    packed = getattr(skeleton.model.get_submodule(name.rpartition(".")[0]), f"{name.rpartition('.')[2]}_packed", None)
    if not isinstance(packed, PackedWeight) or packed.packing.even_steps is None:
        return None
    return format_to_pack(quant).keeping(packed.packing.even_steps, packed.shape)


def _unpacked(skeleton: Skeleton, name: str, parts: dict[str, Tensor], device: torch.device) -> Tensor:
    """Return a weight that the checkpoint has packed."""
    packed = skeleton.model.get_submodule(f"{name}_packed")
    assert isinstance(packed, PackedWeight)
    out = torch.empty(packed.shape, dtype=UNPACKED_DTYPE, device=device)
    return packed.packing.unpack({part: tensor.to(device) for part, tensor in parts.items()}, out)


def _packer(quant: str, shape: tuple[int, ...]) -> Packer:
    """Return the format for a weight of this shape: experts in one tensor are packed so that each can move alone."""
    known = format_to_pack(quant)
    return known.for_shares(shape, shape[0]) if len(shape) == NUM_EXPERT_DIMENSIONS else known


def _packed(name: str, weight: Tensor, known: Packer) -> dict[str, Tensor]:
    """Return the tensors that the parameter is stored as, on the host."""
    packing, parts = known.pack(weight)
    return _stored(name, packing, parts, tuple(weight.shape))


def _stored(name: str, packing: Packer, parts: dict[str, Tensor], shape: tuple[int, ...]) -> dict[str, Tensor]:
    stored = {stored: parts[part].cpu().contiguous() for part, stored in packing.stored_names(name).items()}
    states = packing.states(name, shape)
    return stored | {stored: torch.frombuffer(bytearray(state), dtype=torch.uint8) for stored, state in states.items()}


def _assembled(store: LayerStore, tensor: StoredTensor) -> Tensor:
    """Return the parameter in its stored dtype."""
    views = [store.view(piece) for piece in tensor.pieces]
    if len(views) == 1:
        return tensor.parameter(views[0]).contiguous()
    return torch.cat([view.reshape(-1) for view in views]).view(tensor.shape)


def _is_packed(skeleton: Skeleton, name: str, quant: str) -> bool:
    """Return whether a decoder layer's parameter is worth packing.

    Matrices of linear layers and of experts are. Norms, biases and routers are small, and routing decides much: they
    stay as they are.
    """
    module_name, _, attribute = name.rpartition(".")
    module = skeleton.model.get_submodule(module_name)
    parameter = module.get_parameter(attribute)
    is_linear = attribute == "weight" and isinstance(module, (nn.Linear, Conv1D))
    is_experts = parameter.dim() == NUM_EXPERT_DIMENSIONS
    shape = tuple(parameter.shape)
    return (is_linear or is_experts) and min(shape[-2:]) > 1 and format_to_pack(quant).packs(shape)


def _check_smaller(skeleton: Skeleton, planned: Checkpoint, quant: str) -> None:
    """Raise CheckpointError where packed layers would hardly become smaller, and only lose."""
    packed_bytes = sum(record.stored_bytes for record in skeleton.records)
    planned_bytes = sum(entry.num_bytes for entry in planned.tensors.values() if entry.is_planned)
    keeps = any(_kept(skeleton, name, quant) for record in skeleton.records for name in _weights(record))
    if skeleton.packed and not keeps and planned_bytes > LARGEST_SHARE * packed_bytes:
        raise CheckpointError(
            "E_QUANTIZED",
            f"'{planned.folder}' is quantised already ({', '.join(skeleton.packed_formats)}), and as {quant} it would "
            f"have {planned_bytes / packed_bytes:.0%} of its layers' bytes.",
            "Leave out `quant` and `draft_quant` for it.",
        )
