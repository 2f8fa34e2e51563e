"""Numbers of eight bits times a scale: FP8 as DeepSeek, Qwen, FBGEMM and compressed-tensors publish it, and their int8.

A scale belongs to a block of rows and columns, to a row, or to the whole matrix: its shape says which.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from offload.errors import CheckpointError
from offload.formats.numbers import float_scale, scale_groups
from offload.formats.published import PublishedWeight, stored_matrices
from offload.formats.storage import PartShapes, StorageFormat, StoredParameter

BLOCK_SHAPE = (128, 128)  # where config.json states none


def _find(weight: StoredParameter, *, name: str, dtypes: set[torch.dtype]) -> PublishedWeight | None:
    """Find the format by the numbers' type and their scales."""
    if weight.dtype_of(weight.name) not in dtypes or len(weight.shape) < 2:
        return None
    beside = [weight.sibling(leaf) for leaf in ("weight_scale_inv", "weight_scale")]
    fused = [f"{weight.name}_scale_inv", f"{weight.name}_scale"]  # experts in one tensor
    scale = next((part for part in beside + fused if part in weight.stored), None)
    if scale is None:
        return None
    if weight.has("weight_zero_point"):
        raise weight.cannot_be_used("its 8-bit numbers have zero points, which are not read")
    found = stored_matrices(weight, {"numbers": weight.name, "scale": scale})
    rows, columns = found.rows, found.columns
    numbers = found.part("numbers", (rows, columns), rows_dim=-2)
    of_rows, of_matrix = ((rows, 1), (rows,)), ((), (1,), (1, 1))
    scale_shape = found.shape("scale")
    if scale_shape in of_matrix:
        block, scale_part = (rows, columns), found.part("scale", *of_matrix)
    elif scale_shape in of_rows:
        block, scale_part = (1, columns), found.part("scale", *of_rows, rows_dim=-len(scale_shape))
    else:
        block = _block_shape(weight.stated)
        blocks = (-(-rows // block[0]), -(-columns // block[1]))
        scale_part = found.part("scale", blocks, *of_rows, (1,), rows_dim=-2, rows_each=block[0])
    packing = found.weight(name, {"numbers": numbers, "scale": scale_part}, partial(unpack_scaled, block=block))
    return replace(packing, scale_block=block)


def unpack_scaled(parts: Mapping[str, Tensor], out: Tensor, *, block: tuple[int, int]) -> None:
    """Write numbers [n, r, i] times the scales of their blocks."""
    num_matrices, rows, columns = out.shape
    high, wide = block
    numbers = _floats(parts["numbers"])
    scale = float_scale(parts["scale"]).view(num_matrices, -(-rows // high), -(-columns // wide))
    if high == 1 and columns % wide == 0:
        scale_groups(numbers, scale, out)
        return
    if scale.shape[-1] > 1:
        scale = scale.repeat_interleave(wide, dim=-1)[..., :columns]
    for index in range(scale.shape[1] if high > 1 else 1):
        block_rows = slice(index * high, (index + 1) * high) if high > 1 else slice(None)
        scale_rows = scale[:, index : index + 1] if high > 1 else scale
        torch.mul(numbers[:, block_rows], scale_rows, out=out[:, block_rows])


def _floats(numbers: Tensor) -> Tensor:
    """Return numbers of eight bits as products take them: bf16 holds those of float8, and float32 is a CPU's."""
    if numbers.dtype == torch.int8:
        return numbers
    if numbers.device.type != "cpu":
        return numbers.bfloat16()
    table = torch.arange(256).to(torch.uint8).view(numbers.dtype).float()  # quicker than float8's own conversion
    return table.index_select(0, numbers.view(torch.uint8).reshape(-1).int()).view(numbers.shape)


def _block_shape(stated: Mapping[str, Any]) -> tuple[int, int]:
    """Return the rows and columns of a block, as config.json states them; a group of columns is of one row."""
    groups = (stated.get("config_groups") or {}).values()
    weights = [group.get("weights") or {} for group in groups if isinstance(group, dict)]
    sizes = [(1, each["group_size"]) for each in weights if each.get("strategy") == "group" and each.get("group_size")]
    structures = [each.get("block_structure") for each in weights]
    found = next((shape for shape in (stated.get("weight_block_size"), *structures, *sizes) if shape), BLOCK_SHAPE)
    is_pair = isinstance(found, list | tuple) and len(found) == 2
    if not is_pair or not all(type(size) is int and size > 0 for size in found):
        what = f"the quantization config states blocks of {found!r}, which are no rows and columns."
        raise CheckpointError("E_CONFIG_INVALID", what, "Download the model's config.json again.")
    return found[0], found[1]


def _planned(rows: int, columns: int, stated: Mapping[str, Any]) -> PartShapes | None:
    method, block = stated.get("quant_method"), stated.get("weight_block_size")
    scale: tuple[int, ...] = num_blocks(rows, columns, block) if block and method == "fp8" else ()
    leaf = "weight_scale_inv" if method == "fp8" else "weight_scale"
    if method == "fbgemm_fp8":
        scale = (rows, 1)
    elif method == "modelopt" and stated.get("quant_algo") != "FP8":
        return None
    return {"weight": ((rows, columns), torch.float8_e4m3fn), leaf: (scale, torch.float32)}


def num_blocks(rows: int, columns: int, block: Sequence[int]) -> tuple[int, int]:
    """Return the blocks that share a scale, along rows and columns."""
    return -(-rows // block[0]), -(-columns // block[1])


FP8 = StorageFormat(
    name="fp8",
    methods=("fp8", "fbgemm_fp8", "compressed-tensors", "modelopt"),
    detect=partial(_find, name="fp8", dtypes={torch.float8_e4m3fn, torch.float8_e5m2}),
    leaves=("weight_scale", "weight_scale_inv"),
    planned=_planned,
)
INT_QUANTIZED = StorageFormat(
    name="int-quantized",
    methods=("compressed-tensors",),
    detect=partial(_find, name="int-quantized", dtypes={torch.int8}),
    leaves=("weight_scale", "weight_zero_point"),
)
