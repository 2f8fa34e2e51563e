"""Quantisation of a checkpoint's decoder layers, one layer at a time, from unpacked weights or from larger packed ones.

Of the quantisation REPACKED only packed weights that are put in another layout come out; others stay in their files.

`quantized_layout` says which tensors come out and how large they are, from headers alone;
`quantize_layer` makes them. What comes out has the names and parts of checkpoints that are published
in the same format, so that a cached layer and such a checkpoint load the same way.
"""

from collections import defaultdict
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from offload.checkpoint import Checkpoint, TensorEntry
from offload.errors import CheckpointError
from offload.formats.storage import PackedStorage, PartShapes, Quantizer, named_shapes, stored_shapes
from offload.layer_store import LayerRecord, LayerStore, StoredTensor
from offload.layouts.known import REPACKED, layouts_in_files, quantizer
from offload.layouts.layout import Repacked
from offload.layouts.onednn import is_multiplied_by_hand
from offload.layouts.transposed import Transposed, transposed_shape
from offload.packed_weight import PackedWeight
from offload.skeleton import Skeleton

LARGEST_SHARE = 0.75  # of packed layers' bytes that smaller ones may have: less saving is not worth the loss
NUM_EXPERT_DIMENSIONS = 3  # of the tensor of a layer's experts; the first one counts them
UNPACKED_DTYPE = torch.bfloat16  # of weights that were packed otherwise


def quantized_checkpoint(skeleton: Skeleton, checkpoint: Checkpoint, quant: str) -> Checkpoint:
    """Return the checkpoint as it will be once its layers are quantised.

    It has names, shapes and sizes, and no files. Raises CheckpointError when the checkpoint is packed as small already.
    """
    tensors = tensors_left(skeleton, checkpoint, quant)
    for record in skeleton.records:
        for name, facts in quantized_layout(skeleton, record, quant).items():
            tensors[name] = TensorEntry.planned(name, *facts)
    planned = Checkpoint(folder=checkpoint.folder, tensors=tensors)
    if quant != REPACKED:  # which rounds nothing
        _check_smaller(skeleton, planned, quant)
    return planned


def tensors_left(skeleton: Skeleton, checkpoint: Checkpoint, quant: str) -> dict[str, TensorEntry]:
    """Return the tensors that stay in the checkpoint's own files: all but those of weights that come out."""
    made = {
        piece.name
        for record in skeleton.records
        for stored in _made_weights(skeleton, record, quant).values()
        for tensor in stored.values()
        for piece in tensor.pieces
    }
    return {name: entry for name, entry in checkpoint.tensors.items() if entry.name not in made}


def quantized_layout(skeleton: Skeleton, record: LayerRecord, quant: str) -> PartShapes:
    """Return the tensors of one quantised layer; those whose entry is STATE may be of any length."""
    shapes: PartShapes = {}
    for name, stored in _made_weights(skeleton, record, quant).items():
        shape = tuple(skeleton.model.get_parameter(name).shape)
        repacked = _repacked(skeleton, name, quant)
        packing = _quantizer(skeleton, name, quant) if repacked is None else None
        if repacked is not None:
            shapes |= named_shapes(repacked.storage, name, shape)
        elif packing is None:
            shapes[name] = (shape, _assembled_dtype(stored[""]) if "" in stored else UNPACKED_DTYPE)
        else:
            shapes |= stored_shapes(packing, name, shape)
    return shapes


@torch.no_grad()
def quantize_layer(
    skeleton: Skeleton, record: LayerRecord, store: LayerStore, quant: str, device: torch.device
) -> dict[str, Tensor]:
    """Return the tensors of one quantised layer, on the host; they are computed on `device`."""
    store.populate(record)
    result: dict[str, Tensor] = {}
    for name, stored in _made_weights(skeleton, record, quant).items():
        shape = tuple(skeleton.model.get_parameter(name).shape)
        parts = {part: _assembled(store, tensor) for part, tensor in stored.items()}
        repacked = _repacked(skeleton, name, quant)
        if repacked is not None:
            result |= _stored(name, repacked.storage, repacked.repack(name, parts))
            continue
        packed, packing = _packed_weight(skeleton, name), _quantizer(skeleton, name, quant)
        whole = parts[""] if packed is None else _unpacked(packed, parts, device)
        if packing is None:
            result[name] = whole.cpu().clone()  # a view of the file would be written from a page that may go
        else:
            own, packed_parts = packing.pack(whole.to(device))
            states = own.states(name, shape)
            result |= _stored(name, own, packed_parts)
            result |= {
                stored: torch.frombuffer(bytearray(state), dtype=torch.uint8) for stored, state in states.items()
            }
    store.drop(record)
    return result


def _weights(record: LayerRecord) -> dict[str, dict[str, StoredTensor]]:
    """Return parameter -> its parts; an unpacked one's only part has no name."""
    weights: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
    for name, tensor in record.tensors.items():
        parameter, _, part = name.rpartition("_packed.")
        weights[parameter or name][part if parameter else ""] = tensor
    return weights


def _made_weights(skeleton: Skeleton, record: LayerRecord, quant: str) -> dict[str, dict[str, StoredTensor]]:
    """Return the parameters that come out, with their parts in the checkpoint."""
    weights = _weights(record)
    return {
        name: weights[name] for name in weights if quant != REPACKED or _repacked(skeleton, name, quant) is not None
    }


def _repacked(skeleton: Skeleton, name: str, quant: str) -> Repacked | None:
    """Return how a packed weight is put in another layout in files; None where it is rounded, or stays as it is."""
    packed = _packed_weight(skeleton, name)
    if packed is None or not _is_matrix(skeleton, name):
        return None
    transposed = packed.packing.transposed
    stored, shape = (transposed, transposed_shape(packed.shape)) if transposed else (packed.packing, packed.shape)
    found = next(filter(None, (layout.repacked(stored, shape, None) for layout in layouts_in_files(quant))), None)
    return replace(found, storage=Transposed(transposed=found.storage)) if found and transposed else found


def _packed_weight(skeleton: Skeleton, name: str) -> PackedWeight | None:
    """Return the parts of a weight that the checkpoint has packed; None of an unpacked one."""
    module_name, _, attribute = name.rpartition(".")
    packed = skeleton.model.get_submodule(module_name)._modules.get(f"{attribute}_packed")
    assert packed is None or isinstance(packed, PackedWeight)
    return packed


def _unpacked(packed: PackedWeight, parts: dict[str, Tensor], device: torch.device) -> Tensor:
    """Return a weight that the checkpoint has packed."""
    out = torch.empty(packed.shape, dtype=UNPACKED_DTYPE, device=device)
    return packed.packing.unpack({part: tensor.to(device) for part, tensor in parts.items()}, out)


def _stored(name: str, packing: PackedStorage, parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that the parameter's parts are stored as, on the host."""
    return {stored: parts[part].cpu().contiguous() for part, stored in packing.stored_names(name).items()}


def _assembled(store: LayerStore, tensor: StoredTensor) -> Tensor:
    """Return the parameter in its stored dtype, or in the one that it is computed in."""
    if any(piece.computed or piece.is_in_turn for piece in tensor.pieces):
        return store.assembled(tensor, _assembled_dtype(tensor)).contiguous()
    views = [store.view(piece) for piece in tensor.pieces]
    if len(views) == 1:
        return tensor.parameter(views[0]).contiguous()
    return torch.cat([view.reshape(-1) for view in views]).view(tensor.shape)


def _assembled_dtype(tensor: StoredTensor) -> torch.dtype:
    piece = tensor.pieces[0]
    return piece.dtype if piece.computed is None else tensor.dtype


def _quantizer(skeleton: Skeleton, name: str, quant: str) -> Quantizer | None:
    """Return the format for a decoder layer's parameter; None where it is not worth packing.

    Experts in one tensor are packed so that each can move alone.
    """
    shape, known = tuple(skeleton.model.get_parameter(name).shape), quantizer(quant)
    if not _is_matrix(skeleton, name) or not known.packs(shape):
        return None
    return known.for_shares(shape, shape[0]) if len(shape) == NUM_EXPERT_DIMENSIONS else known


def _is_matrix(skeleton: Skeleton, name: str) -> bool:
    """Return whether a decoder layer's parameter is worth packing: matrices of linear layers and of experts are.

    Norms, biases and routers are small, and routing decides much: they stay as they are.
    """
    module_name, _, attribute = name.rpartition(".")
    module = skeleton.model.get_submodule(module_name)
    shape = tuple(module.get_parameter(attribute).shape)
    is_linear = attribute == "weight" and isinstance(module, (nn.Linear, Conv1D))
    is_linear &= not is_multiplied_by_hand(skeleton.model, name)
    return (is_linear or len(shape) == NUM_EXPERT_DIMENSIONS) and min(shape[-2:]) > 1


def _check_smaller(skeleton: Skeleton, planned: Checkpoint, quant: str) -> None:
    """Raise CheckpointError where packed layers would hardly become smaller, and only lose.

    Weights that are repacked lose nothing, and do not count.
    """
    packed_bytes = sum(record.stored_bytes for record in skeleton.records)
    planned_bytes = sum(entry.num_bytes for entry in planned.tensors.values() if entry.is_planned)
    has_rounded = False
    for name, stored in (weight for record in skeleton.records for weight in _weights(record).items()):
        repacked = _repacked(skeleton, name, quant)
        has_rounded |= repacked is None and _packed_weight(skeleton, name) is not None
        if repacked is not None:
            packed_bytes -= sum(piece.num_bytes for tensor in stored.values() for piece in tensor.pieces)
            made = repacked.storage.stored_names(name).values()
            planned_bytes -= sum(planned.tensors[part].num_bytes for part in made)
    if has_rounded and planned_bytes > LARGEST_SHARE * packed_bytes:
        raise CheckpointError(
            "E_QUANTIZED",
            f"'{planned.folder}' is quantised already ({', '.join(skeleton.packed_formats)}), and as {quant} it would "
            f"have {planned_bytes / packed_bytes:.0%} of its layers' bytes.",
            "Leave out `quant` and `draft_quant` for it.",
        )
