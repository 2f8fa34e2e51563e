"""A GGUF file's tensors under the names and in the pieces in which the model is published as safetensors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch

from offload.checkpoint import Checkpoint, TensorEntry
from offload.formats.gguf_blocks import PLAIN
from offload.gguf.families import EXPERTS, IN_LAYER, OUTSIDE, Family
from offload.gguf.forms import UnpackedTensor
from offload.gguf.header import GgufHeader, GgufTensor
from offload.gguf.settings import READ_AS_SETTINGS, family_of, not_read

LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
NUM_MATRIX_DIMENSIONS, NUM_EXPERT_DIMENSIONS = 2, 3


def gguf_checkpoint(header: GgufHeader, fields: dict[str, Any]) -> Checkpoint:
    """Return the tensors; `fields` are those of config.json. Raises CheckpointError for one that is not understood."""
    family = family_of(header)
    read = {name for scaling in family.scalings for name in READ_AS_SETTINGS.get(scaling, ())}
    tensors: dict[str, TensorEntry] = {}
    for tensor in header.tensors.values():
        if tensor.name not in read:
            tensors |= {entry.name: entry for entry in _entries(header, family, tensor, fields)}
    return Checkpoint(folder=header.path, tensors=tensors)


def _entries(header: GgufHeader, family: Family, tensor: GgufTensor, fields: dict[str, Any]) -> Iterator[TensorEntry]:
    in_layer = LAYER.fullmatch(tensor.name)
    if in_layer is None:
        path, _, leaf = tensor.name.rpartition(".")
        if path not in OUTSIDE or leaf != "weight":
            raise not_read(header, f"has a tensor '{tensor.name}'")
        is_norm = path == "output_norm"
        yield _plain(f"{OUTSIDE[path]}.{leaf}", tensor, added=-1.0 if is_norm and family.norms_plus_one else 0.0)
        return
    layer, path, leaf = in_layer.groups()
    names = {**IN_LAYER, **family.names}
    if path not in names or (family.model_type == "phi3" and path == "ffn_gate"):
        raise not_read(header, f"has a tensor '{tensor.name}'")
    module = f"model.layers.{layer}.{names[path]}"
    heads = {"attn_q": fields["num_attention_heads"], "attn_k": fields["num_key_value_heads"]}
    num_heads = heads.get(path, 0) if family.rotates_neighbours else 0
    if num_heads and tensor.shape[0] % (2 * num_heads):
        raise not_read(header, f"has '{tensor.name}' with {tensor.shape[0]} rows for {num_heads} heads")
    if path in EXPERTS and len(tensor.shape) == NUM_EXPERT_DIMENSIONS:
        yield from _experts(f"model.layers.{layer}.mlp.experts", EXPERTS[path], tensor)
    elif len(tensor.shape) == NUM_MATRIX_DIMENSIONS and (num_heads or not tensor.block.is_plain):
        yield _packed(module, tensor, num_heads=num_heads)
    else:
        is_norm = path.endswith("norm") and family.norms_plus_one
        yield _plain(f"{module}.{leaf}", tensor, added=-1.0 if is_norm else 0.0, num_heads=num_heads)


def _plain(name: str, tensor: GgufTensor, *, added: float = 0.0, num_heads: int = 0) -> TensorEntry:
    """Return a tensor as it lies, or one that is computed when it is loaded."""
    if tensor.block.is_plain and not added and not num_heads:
        dtype = PLAIN[tensor.block.name]
        return _entry(name, tensor, tensor.shape, dtype=dtype)
    form = UnpackedTensor(shape=tensor.shape, block=tensor.block, added=added, num_heads=num_heads)
    return _entry(name, tensor, (tensor.num_bytes,), form=form)


def _packed(module: str, tensor: GgufTensor, *, num_heads: int = 0) -> TensorEntry:
    """Return a matrix that stays in its blocks: [rows, bytes], or [heads, rows of a head, bytes]."""
    rows = tensor.shape[0]
    shape = (num_heads, rows // num_heads) if num_heads else (rows,)
    return _entry(f"{module}.gguf_{tensor.block.name.lower()}", tensor, (*shape, tensor.num_bytes // rows))


def _experts(module: str, projection: str, tensor: GgufTensor) -> Iterator[TensorEntry]:
    """Yield the matrices of a layer's experts, which follow each other in one tensor."""
    num_experts, rows, columns = tensor.shape
    each = tensor.num_bytes // num_experts
    for expert in range(num_experts):
        place = {"file": tensor.file, "offset": tensor.offset + expert * each, "num_bytes": each}
        one = GgufTensor(name=tensor.name, block=tensor.block, shape=(rows, columns), **place)  # type: ignore[arg-type]
        name = f"{module}.{expert}.{projection}"
        yield _plain(f"{name}.weight", one) if one.block.is_plain else _packed(name, one)


def _entry(
    name: str,
    tensor: GgufTensor,
    shape: tuple[int, ...],
    *,
    dtype: torch.dtype = torch.uint8,
    form: UnpackedTensor | None = None,
) -> TensorEntry:
    return TensorEntry(
        name=name,
        dtype=dtype,
        shape=shape,
        file=tensor.file,
        offset=tensor.offset,
        num_bytes=tensor.num_bytes,
        form=form,
    )
