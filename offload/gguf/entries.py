"""The places of a GGUF file's tensors, as entries under the names of safetensors.

A tensor that is one of several in a parameter has its number behind the name: "mlp.gate_up_proj.weight[0]".
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from offload.checkpoint import StorageType, TensorEntry, split_number
from offload.formats.gguf_blocks import LEAVES, UNPACKED
from offload.gguf.header import GgufTensor
from offload.gguf.storage_types import OffsetIds, UnpackedTensor

EXPERT = re.compile(r"(.+\.experts)\.\d+\.(\w+)\.\w+")  # published one by one, and one parameter in the model
DOWN = {"down_proj", "w2"}
IS_BARE = re.compile(r"\.experts\.\w+$")  # parameters of all experts have no "weight" behind their names


def unpacked(name: str, tensor: GgufTensor, *, added: float = 0.0, num_heads: int = 0) -> TensorEntry:
    """Return a tensor as it lies, or one that is computed when it is loaded."""
    if tensor.block.is_unpacked and not added and not num_heads:
        dtype = UNPACKED[tensor.block.name]
        return entry(name, tensor, tensor.shape, dtype=dtype)
    computed = UnpackedTensor(shape=tensor.shape, block=tensor.block, added=added, num_heads=num_heads)
    return entry(name, tensor, (tensor.num_bytes,), computed=computed)


def packed(module: str, tensor: GgufTensor, *, num_heads: int = 0) -> TensorEntry:
    """Return a matrix that stays in its blocks: [rows, bytes], or [heads, rows of a head, bytes]."""
    rows = tensor.shape[0]
    shape = (num_heads, rows // num_heads) if num_heads else (rows,)
    return entry(f"{module}.gguf_{tensor.block.name.lower()}", tensor, (*shape, tensor.num_bytes // rows))


def experts(module: str, projection: str, tensor: GgufTensor) -> Iterator[TensorEntry]:
    """Yield the matrices of a layer's experts, which follow each other in one tensor."""
    for expert, one in enumerate(matrices_of(tensor)):
        yield matrix(f"{module}.{expert}.{projection}", one)


def matrix(module: str, tensor: GgufTensor) -> TensorEntry:
    """Return a matrix as it lies, in its blocks or unpacked."""
    return unpacked(f"{module}.weight", tensor) if tensor.block.is_unpacked else packed(module, tensor)


def numbered(one: TensorEntry, number: int) -> TensorEntry:
    """Return a tensor as one of several that follow each other in a parameter."""
    return replace(one, name=f"{one.name}[{number}]")


def rows_of(tensor: GgufTensor, first: int, count: int) -> GgufTensor:
    """Return some of a tensor's rows, which lie as they do in the file."""
    if first + count > tensor.shape[0]:
        raise ValueError(f"{tensor.shape[0]} rows have no row {first + count - 1}")
    each = tensor.num_bytes // tensor.shape[0]
    return replace(
        tensor, shape=(count, *tensor.shape[1:]), offset=tensor.offset + first * each, num_bytes=count * each
    )


def matrices_of(tensor: GgufTensor) -> list[GgufTensor]:
    """Return what follows each other along a tensor's first dimension."""
    return [replace(one, shape=tensor.shape[1:]) for one in runs_of(tensor, 1)]


def runs_of(tensor: GgufTensor, rows: int) -> list[GgufTensor]:
    """Return a tensor in runs of so many rows."""
    return [rows_of(tensor, first, rows) for first in range(0, tensor.shape[0], rows)]


def of_one_type(tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Return the tensors, those that are unpacked when they are loaded of which a parameter has several types."""
    leaves: dict[str, set[str]] = {}
    for name in tensors:
        leaves.setdefault(_shared_parameter(name), set()).add(split_number(name)[0].rpartition(".")[2])
    found = {}
    for name, one in tensors.items():
        shared = _shared_parameter(name)
        whole, number = split_number(name)
        module, _, leaf = whole.rpartition(".")
        if shared and leaf in LEAVES and len(leaves[shared]) > 1 and not one.is_in_turn:
            block = LEAVES[leaf]
            computed = UnpackedTensor(
                shape=(one.shape[0], one.shape[1] // block.num_bytes * block.weights), block=block
            )
            parameter = module if number is not None and IS_BARE.search(module) else f"{module}.weight"
            name = parameter if number is None else f"{parameter}[{number}]"
            one = replace(one, name=name, shape=(one.num_bytes,), computed=computed)
        found[name] = one
    return found


def _shared_parameter(name: str) -> str:
    """Return a name of the parameter that a tensor shares with others: gates and their products are one; else ""."""
    whole, number = split_number(name)
    if number is not None:
        return whole.rpartition(".")[0]
    expert = EXPERT.fullmatch(whole)
    return f"{expert[1]}.{'down' if expert[2] in DOWN else 'gate_up'}" if expert else ""


def as_parameter(one: TensorEntry) -> TensorEntry:
    """Return what a tensor is once it is loaded: a draft's is compared so with its config.json."""
    module, _, leaf = one.name.rpartition(".")
    block = LEAVES.get(leaf)
    if block is not None:
        *rows, num_bytes = one.shape
        shape = (math.prod(rows), num_bytes // block.num_bytes * block.weights)
        return TensorEntry.planned(f"{module}.weight", shape, torch.float32)
    is_map = isinstance(one.computed, OffsetIds)
    dtype = one.dtype if one.computed is None else torch.int64 if is_map else torch.float32
    return TensorEntry.planned(one.name, one.parameter_shape, dtype)


def entry(
    name: str,
    tensor: GgufTensor,
    shape: tuple[int, ...],
    *,
    dtype: torch.dtype = torch.uint8,
    computed: StorageType | None = None,
) -> TensorEntry:
    """Return a tensor's place under a name, in a shape that its bytes or numbers have."""
    return TensorEntry(
        name=name,
        dtype=dtype,
        shape=shape,
        file=tensor.file,
        offset=tensor.offset,
        num_bytes=tensor.num_bytes,
        computed=computed,
    )
