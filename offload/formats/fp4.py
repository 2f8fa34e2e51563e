"""Floating-point numbers of four bits, in groups of columns that share a scale: NVFP4 and MXFP4.

NVFP4 has a scale of eight bits for 16 numbers and one for the matrix; compressed-tensors divides by the latter,
ModelOpt multiplies. MXFP4 has a power of two for 32 numbers; gpt-oss keeps its experts transposed.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from offload.formats.four_bits_kernel import unpack_fp4, works_on
from offload.formats.numbers import float_scale, looked_up, scale_groups
from offload.formats.published import PublishedWeight, StoredMatrices, stored_matrices
from offload.formats.storage import EvenSteps, PartShapes, Steps, StorageFormat, StoredParameter

ScaleOf = Callable[[Mapping[str, Tensor]], Tensor]  # parts [n, ...] -> float32 [n, r, G]

FP4_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)  # E2M1
WHOLE_NUMBERS = frozenset(int(2 * number) for number in FP4_NUMBERS)  # in steps of a half
LARGEST = max(WHOLE_NUMBERS)
STEP_BITS = 5  # of a whole number beside the least one
FROM_ZERO = tuple(2 * number + LARGEST for number in FP4_NUMBERS)


def _find_nvfp4(weight: StoredParameter) -> PublishedWeight | None:
    """Find NVFP4 by the matrix's own scale, in the names of its two publishers."""
    for packed, global_leaf, apply in (
        (weight.sibling("weight_packed"), "weight_global_scale", torch.div),
        (weight.name, "weight_scale_2", torch.mul),
    ):
        if weight.dtype_of(packed) != torch.uint8:
            continue
        if not weight.has(global_leaf) and (packed == weight.name or _has_powers(weight)):
            continue
        names = {"packed": packed, "scale": weight.sibling("weight_scale"), "global_scale": weight.sibling(global_leaf)}
        found = stored_matrices(weight, names)
        parts = {
            "packed": found.part("packed", (found.rows, found.columns // 2), rows_dim=-2),
            "scale": found.part("scale", (found.rows, found.columns // 16), rows_dim=-2),
            "global_scale": found.part("global_scale", (), (1,), (1, 1)),
        }
        return _in_steps(
            found, found.weight("nvfp4", parts, partial(_unpack_nvfp4, apply=apply)), partial(_nvfp4_scale, apply=apply)
        )
    return None


def _find_mxfp4(weight: StoredParameter) -> PublishedWeight | None:
    """Find MXFP4 by blocks of numbers, as gpt-oss has them, or by scales that are powers of two."""
    if len(weight.shape) == 3 and any(f"{weight.name}_{part}" in weight.stored for part in ("blocks", "scales")):
        names = {"packed": f"{weight.name}_blocks", "scale": f"{weight.name}_scales"}
        found = stored_matrices(weight, names, is_transposed=True)
        groups = found.columns // 32
        parts = {
            "packed": found.part("packed", (found.rows, groups, 16), rows_dim=-3),
            "scale": found.part("scale", (found.rows, groups), rows_dim=-2),
        }
        return _in_steps(found, found.weight("mxfp4", parts, _unpack_blocks, is_transposed=True), _mxfp4_scale)
    packed = weight.sibling("weight_packed")
    if weight.dtype_of(packed) != torch.uint8 or not _has_powers(weight):
        return None
    found = stored_matrices(weight, {"packed": packed, "scale": weight.sibling("weight_scale")})
    parts = {
        "packed": found.part("packed", (found.rows, found.columns // 2), rows_dim=-2),
        "scale": found.part("scale", (found.rows, found.columns // 32), rows_dim=-2),
    }
    return _in_steps(found, found.weight("mxfp4", parts, _unpack_mxfp4), _mxfp4_scale)


def _has_powers(weight: StoredParameter) -> bool:
    """Return whether a weight's scales are powers of two, which are stored as bytes."""
    return weight.dtype_of(weight.sibling("weight_scale")) in (torch.uint8, torch.float8_e8m0fnu)


def _in_steps(matrices: StoredMatrices, weight: PublishedWeight, scale_of: ScaleOf) -> PublishedWeight:
    """Return the weight as steps of half its scale, too: E2M1 numbers are whole halves."""

    def read(stored: Mapping[str, Tensor]) -> Steps:
        parts = weight.by_matrix(stored)
        scale = scale_of(parts)
        numbers = looked_up(parts["packed"].reshape(*scale.shape[:-1], -1), FROM_ZERO)
        zeros = scale.new_full((), LARGEST, dtype=torch.bfloat16).expand_as(scale)
        return Steps(numbers=numbers, zeros=zeros, scale=scale / 2)

    return replace(
        weight,
        has_kernel=has_kernel,
        even_steps=EvenSteps(
            num_matrices=matrices.num_matrices,
            bits=STEP_BITS,
            num_groups=math.prod(matrices.shape("scale")) // matrices.rows,
            in_order=True,
            read=read,
            numbers=WHOLE_NUMBERS,
        ),
    )


def _nvfp4_scale(parts: Mapping[str, Tensor], *, apply: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    return apply(parts["scale"].float(), parts["global_scale"].float().view(-1, 1, 1))


def _mxfp4_scale(parts: Mapping[str, Tensor]) -> Tensor:
    return float_scale(parts["scale"])


def _unpack_nvfp4(parts: Mapping[str, Tensor], out: Tensor, *, apply: Callable[[Tensor, Tensor], Tensor]) -> None:
    _unpack(parts["packed"], _nvfp4_scale(parts, apply=apply), out)


def _unpack_mxfp4(parts: Mapping[str, Tensor], out: Tensor) -> None:
    _unpack(parts["packed"], float_scale(parts["scale"]), out)


def _unpack_blocks(parts: Mapping[str, Tensor], out: Tensor) -> None:
    """Write blocks [n, r, G, 16] times scale [n, r, G]."""
    _unpack(parts["packed"].flatten(-2), float_scale(parts["scale"]), out)


def _unpack(packed: Tensor, scale: Tensor, out: Tensor) -> None:
    """Write packed [n, r, i / 2] times float32 scale [n, r, G]."""
    if has_kernel(out.device, out.dtype):
        unpack_fp4(packed, scale, out)
    else:
        unpack_by_table(packed.contiguous(), scale.contiguous(), out)


def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether one kernel unpacks such weights to a dtype on a device."""
    return works_on(device, dtype, _is_equal)


def _is_equal(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the kernel unpacks all bytes as the table does, with a scale whose products have fewer digits."""
    every = torch.arange(256, dtype=torch.uint8, device=device).view(1, 4, 64)
    scale = torch.tensor([2.0**-130, 0.3, 1.0, 2.0**125], device=device).repeat(4).view(1, 4, 4)
    found, expected = (torch.empty(1, 4, 128, dtype=dtype, device=device) for _ in range(2))
    unpack_fp4(every, scale, found)
    unpack_by_table(every, scale, expected)
    return torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def unpack_by_table(packed: Tensor, scale: Tensor, out: Tensor) -> None:
    """Write packed [n, r, i / 2] times scale [n, r, G] by torch's operations."""
    scale_groups(looked_up(packed, FP4_NUMBERS), scale, out)


def _planned_modelopt(rows: int, columns: int, stated: Mapping[str, Any]) -> PartShapes | None:
    if stated.get("quant_algo") != "NVFP4":
        return None
    return {"weight_scale_2": ((), torch.float32), **part_shapes(rows, columns, "weight", torch.float8_e4m3fn)}


def part_shapes(rows: int, columns: int, packed: str, scale_dtype: torch.dtype) -> PartShapes:
    """Return the parts of NVFP4, whose scales have numbers of eight bits for 16 columns, or MXFP4: bytes for 32."""
    group = 32 if scale_dtype == torch.uint8 else 16
    return {packed: ((rows, columns // 2), torch.uint8), "weight_scale": ((rows, columns // group), scale_dtype)}


NVFP4 = StorageFormat(
    name="nvfp4", methods=("compressed-tensors", "modelopt"), detect=_find_nvfp4, planned=_planned_modelopt,
    leaves=("weight_packed", "weight_scale", "weight_scale_2", "weight_global_scale"),
)  # fmt: skip
MXFP4 = StorageFormat(name="mxfp4", methods=("mxfp4", "compressed-tensors"), detect=_find_mxfp4)
