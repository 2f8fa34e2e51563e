"""Kernels, compiled for the processor, of numbers of four bits that stand for sixteen values (`native/tables.py`).

Products are of activations that are rounded to 15 bits, for any number of rows, with float32 sums in one order.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from offload.formats.gguf_bits import FP4_NUMBERS
from offload.native.compiler import compiled, has_wide_registers, is_available
from offload.native.weights import NativeWeight, weight_of_parts

# Those of bitsandbytes, which takes a second to import: nf4's are of QLoRA (arXiv 2305.14314), appendix E
NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
FP4_TWELFTHS = (0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3)
E2M1 = "e2m1"  # the kind of MXFP4 and NVFP4
# nf4's values lie 4e-5 of the largest beside whole numbers, in root mean square: with more bits, sums of products would
# be cut before 32 columns are added, which takes a sixth of a product's time. Others are whole
UNITS = {"nf4": 3734.777, "fp4": 192, E2M1: 1}
DTYPES = (torch.bfloat16, torch.float32)  # of rows
COLUMNS = 32  # that activations are rounded together in
SAMPLE_SHAPE, SAMPLE_ROWS = (64, 128), 7
LARGEST_ERROR = 5e-4  # of a product, beside its largest number: those of smooth rows are small


def serves(kind: str, block_size: int, dtype: torch.dtype) -> bool:
    """Return whether the kernel is there for this processor, and computes what it should."""
    columns = min(block_size, COLUMNS)
    is_power_of_two = block_size.bit_count() == 1
    return dtype in DTYPES and is_power_of_two and is_available() and _is_right(kind, columns)


def native_table(kind: str, block_size: int, parts: Mapping[str, Any]) -> NativeWeight:
    """Return a weight of numbers uint8 [r, i / 2] with scales bf16 [B, r] as its kernel takes it."""
    both, code = (parts["numbers"].contiguous(), parts["scales"].contiguous()), _code(kind, min(block_size, COLUMNS))
    rows, columns = both[0].shape[0], both[0].shape[1] * 2
    return weight_of_parts(code, both, rows=rows, columns=columns, more=[block_size], takes_rounded=True)


@functools.cache
def values(kind: str, device: torch.device) -> Tensor:
    """Return what numbers of this kind stand for: float32."""
    if kind == "fp4":
        return torch.tensor(FP4_TWELFTHS, dtype=torch.float32, device=device).div_(12)
    return torch.tensor(NF4_VALUES if kind == "nf4" else FP4_NUMBERS, dtype=torch.float32, device=device)


@functools.cache
def _code(kind: str, columns: int) -> Any:
    from offload.native.instructions import WIDE
    from offload.native.tables import Table, tables_module

    whole = (values(kind, torch.device("cpu")).double() * UNITS[kind]).round()
    table = Table(values=tuple(map(int, whole)), unit=UNITS[kind])
    if has_wide_registers():
        return compiled(str(tables_module(table, (8, 4, 2, 1), width=WIDE, columns=columns)))
    return compiled(str(tables_module(table, (3, 2, 1), columns=columns)))


@functools.cache
def _is_right(kind: str, columns: int) -> bool:
    """Return whether the kernel's products are those of unpacked weights, for a row alone by bits as among others."""
    from offload.layouts.nf4_cpu import in_order

    rows, width = SAMPLE_SHAPE
    numbers = torch.arange(rows * width).mul_(7).remainder_(61).remainder_(16).to(torch.uint8).view(rows, width)
    scales = torch.linspace(0.5, 1.5, width // columns * rows).to(torch.bfloat16).view(-1, rows)  # [B, r]
    weight = values(kind, numbers.device)[numbers.int()] * scales.T.float().repeat_interleave(columns, dim=1)
    given = torch.linspace(-1, 1, SAMPLE_ROWS * width).sin_().view(SAMPLE_ROWS, width)
    parts = {"numbers": in_order(numbers), "scales": scales}
    product, alone = (native_table(kind, columns, parts).product(some) for some in (given, given[4:5]))
    error = (product - given @ weight.T).abs().max() / product.abs().max()
    return bool(error < LARGEST_ERROR) and torch.equal(alone, product[4:5])
