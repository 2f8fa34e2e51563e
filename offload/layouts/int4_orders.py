"""The orders of numbers of four bits in memory in which a processor's kernels read them.

Kernels that are compiled for the processor have one for all kinds. torch's, which serve elsewhere, have several.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from offload.layouts.int4_lanes import LANES, LaneOrder
from offload.native.compiler import is_available

NUM_ROWS = 64  # a weight has a multiple of so many rows, so that all of them stand in whole blocks of any order


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOrder:
    """The order of a CPU's kernel: for a block of rows, column by column, two rows' numbers a byte."""

    name: str  # what tells it from others, in the names of parts
    num_rows: int  # of a block
    is_halved: bool  # a byte has row j and row j + num_rows / 2; else rows 2 j and 2 j + 1
    num_columns: int = 1  # that stand together: a weight has a multiple of them
    dtypes: ClassVar = (torch.bfloat16,)  # of rows

    def runs_on(self, device: torch.device) -> bool:
        """Return whether this is the order of torch's kernel on this processor."""
        return device.type == "cpu" and self == torch_order()

    def packed(self, numbers: Tensor) -> Tensor:
        """Return numbers uint8 [..., r, i] in memory's order, two a byte: uint8 [..., r, i / 2]."""
        blocks = numbers.unflatten(-2, (-1, self.num_rows)).mT  # [..., r / b, i, b]
        low, high = blocks.chunk(2, dim=-1) if self.is_halved else (blocks[..., ::2], blocks[..., 1::2])
        packed: Tensor = low | high << 4
        return packed.reshape(*numbers.shape[:-1], -1)

    def in_columns(self, packed: Tensor, out: Tensor) -> Tensor:
        """Return the numbers of a matrix's rows [r, i / 2], column by column, written to `out`: uint8 [i, r]."""
        blocks = packed.view(-1, len(out), self.num_rows // 2)  # [r / b, i, b / 2]
        if self.is_halved:
            parts = [half for halves in zip(blocks, blocks >> 4, strict=True) for half in halves]
        else:
            pairs = blocks.to(torch.int16)
            parts = list((pairs | pairs << 4).view(torch.uint8))
        return torch.cat(parts, dim=-1, out=out).bitwise_and_(15)

    def product(self, rows: Tensor, packed: Tensor, steps: Tensor, *, group_size: int) -> Tensor:
        """Return the kernel's product of bf16 rows [n, i] with numbers and steps [G, r, 2]: [n, r]."""
        found: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, packed, group_size, steps)
        return found


CPU = torch.device("cpu")
ORDERS: tuple[BlockOrder | LaneOrder, ...] = (
    LANES,
    BlockOrder(name="halves64", num_rows=64, is_halved=True),  # AVX-512
    BlockOrder(name="halves32", num_rows=32, is_halved=True),  # AVX2
    BlockOrder(name="pairs32", num_rows=32, is_halved=False),  # others
)


def kernel_order() -> BlockOrder | LaneOrder | None:
    """Return the order of the fastest kernel on this processor; None where it has none, or one that is not known."""
    return LANES if LANES.runs_on(CPU) else torch_order()


def own_order() -> BlockOrder | LaneOrder:
    """Return the order that numbers are put in here, without compiling its kernel, which has to be right to be used."""
    return LANES if is_available() else torch_order() or ORDERS[0]


@functools.cache
def torch_order() -> BlockOrder | None:
    """Return the order of torch's kernel on this processor."""
    numbers = torch.arange(NUM_ROWS * 32, dtype=torch.int32).view(NUM_ROWS, -1)
    numbers = (numbers * 7 + numbers // 16) % 16
    try:
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers, 1)
    except (AttributeError, NotImplementedError, RuntimeError):
        return None
    numbers = numbers.to(torch.uint8)
    known = (order for order in ORDERS if isinstance(order, BlockOrder))
    return next((order for order in known if torch.equal(order.packed(numbers), packed)), None)
