"""Quantising a checkpoint's decoder layers, one layer at a time.

`quantized_layout` says which tensors come out and how large they are, from headers alone;
`quantize_layer` makes them. What comes out has the names and the form that bitsandbytes gives its
own checkpoints, so that a cached layer and a checkpoint that was published quantised load the same
way.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import torch
from torch import Tensor

from offload.checkpoint import Checkpoint, TensorEntry
from offload.errors import CheckpointError
from offload.kernels import bitsandbytes_functional
from offload.layer_store import LayerRecord, LayerStore, StoredTensor
from offload.packed_checkpoint import INT8, STATE_KEY, is_quantizable, state_content
from offload.packed_weight import NESTED_BLOCK_SIZE, PackedFormat
from offload.skeleton import Skeleton

WEIGHTS_AT_ONCE = 1 << 20  # whose temporaries exist together
_FORMATS = {"int8": INT8, "nf4": PackedFormat(kind="nf4", nested=True)}


def quantized_checkpoint(skeleton: Skeleton, checkpoint: Checkpoint, quant: str) -> Checkpoint:
    """The checkpoint as it will be once its layers are quantised: names, shapes and sizes, no files.

    Raises CheckpointError when it is quantised already.
    """
    _check_not_quantized(skeleton, checkpoint)
    tensors = outside_tensors(skeleton)
    for record in skeleton.records:
        for name, (shape, dtype) in quantized_layout(skeleton, record, quant).items():
            num_bytes = math.prod(shape) * dtype.itemsize
            tensors[name] = TensorEntry(name=name, dtype=dtype, shape=shape, file=Path(), offset=0, num_bytes=num_bytes)
    return Checkpoint(folder=checkpoint.folder, tensors=tensors)


def outside_tensors(skeleton: Skeleton) -> dict[str, TensorEntry]:
    """What is not in the decoder layers, under its names in the checkpoint."""
    return {entry.name: entry for entry in skeleton.outside.entries}


def quantized_layout(
    skeleton: Skeleton, record: LayerRecord, quant: str
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """The tensors of one quantised layer: name -> (shape, dtype)."""
    layout = {}
    for name, tensor in record.tensors.items():
        if not _is_packed(skeleton, name):
            layout[name] = (tensor.shape, tensor.pieces[0].dtype)
            continue
        packing = _FORMATS[quant]
        shapes = packing.part_shapes(tensor.shape)
        layout |= {stored: shapes[part] for part, stored in packing.stored_names(name).items()}
        if packing.kind != "int8":
            # The state's length depends on the digits of its numbers; it is not streamed.
            layout[f"{name}.{STATE_KEY}{packing.kind}"] = ((0,), torch.uint8)
    return layout


@torch.no_grad()
def quantize_layer(
    skeleton: Skeleton, record: LayerRecord, store: LayerStore, quant: str, device: torch.device
) -> dict[str, Tensor]:
    """The tensors of one quantised layer, on the host; computed on `device`."""
    store.populate(record)
    result: dict[str, Tensor] = {}
    for name, tensor in record.tensors.items():
        whole = _assembled(store, tensor)
        if not _is_packed(skeleton, name):
            result[name] = whole.clone()  # a view of the file would be written from a page that may go
        elif quant == "int8":
            result |= _named(name, INT8, int8_parts(whole.to(device)))
        else:
            packing, parts = nf4_parts(whole.to(device))
            result |= _named(name, packing, parts)
            state = bytearray(state_content(tensor.shape, packing))
            result[f"{name}.{STATE_KEY}{packing.kind}"] = torch.frombuffer(state, dtype=torch.uint8)
    store.drop(record)
    return result


def int8_parts(weight: Tensor) -> dict[str, Tensor]:
    """Rows scaled to [-127, 127] by their largest magnitude (LLM.int8(), section 2, weights only)."""
    rows = weight.reshape(-1, weight.shape[-1])
    packed, scale = torch.empty_like(rows, dtype=torch.int8), rows.new_empty(rows.shape[0], dtype=torch.float32)
    rows_at_once = max(1, WEIGHTS_AT_ONCE // rows.shape[1])
    for first in range(0, rows.shape[0], rows_at_once):
        share = rows[first : first + rows_at_once].float()
        largest = share.abs().amax(dim=1)
        scale[first : first + rows_at_once] = largest
        steps = 127 / largest.clamp_min(torch.finfo(torch.float32).tiny)
        packed[first : first + rows_at_once] = (share * steps[:, None]).round_().to(torch.int8)
    return {"packed": packed.view(weight.shape), "scale": scale}


def nf4_parts(weight: Tensor) -> tuple[PackedFormat, dict[str, Tensor]]:
    """Blocks of 64 in 4-bit NormalFloat, their scales in 8 bits (QLoRA, section 3)."""
    functional = bitsandbytes_functional()
    packing = _FORMATS["nf4"]
    blocks = weight.reshape(-1, packing.block_size)
    packed, scales = [], []
    for share in blocks.split(WEIGHTS_AT_ONCE // packing.block_size):
        quantized, state = functional.quantize_4bit(share, blocksize=packing.block_size, quant_type="nf4")
        packed.append(quantized)
        scales.append(state.absmax)
    scale = torch.cat(scales)
    offset = scale.mean()
    nested, state = functional.quantize_blockwise(scale - offset, blocksize=NESTED_BLOCK_SIZE)
    parts = {"packed": torch.cat(packed), "absmax": nested, "nested_absmax": state.absmax}
    return dataclasses.replace(packing, offset=float(offset)), parts


def _named(name: str, packing: PackedFormat, parts: dict[str, Tensor]) -> dict[str, Tensor]:
    return {stored: parts[part].cpu().contiguous() for part, stored in packing.stored_names(name).items()}


def _assembled(store: LayerStore, tensor: StoredTensor) -> Tensor:
    """The parameter in its stored dtype."""
    views = [store.view(piece) for piece in tensor.pieces]
    return views[0] if len(views) == 1 else torch.cat([view.reshape(-1) for view in views]).view(tensor.shape)


def _is_packed(skeleton: Skeleton, name: str) -> bool:
    module_name, _, attribute = name.rpartition(".")
    module = skeleton.model.get_submodule(module_name)
    parameter = module._parameters[attribute]
    return parameter is not None and is_quantizable(module, attribute, parameter)


def _check_not_quantized(skeleton: Skeleton, checkpoint: Checkpoint) -> None:
    if skeleton.packed:
        raise CheckpointError(
            "E_QUANTIZED",
            f"'{checkpoint.folder}' is quantised already ({skeleton.packed[0].weights[0][1].packing.kind}).",
            "Leave out `quant` and `draft_quant` for it.",
        )
