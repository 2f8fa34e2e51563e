"""The order of numbers of four bits that kernels read which are compiled for the processor: the same on all of them.

Products are of activations that are rounded to 15 bits (`native/rounded_rows.py`), with float32 sums in one order.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from offload.native.compiler import compiled, has_wide_registers, is_available
from offload.native.weights import NativeWeight, weight_of_parts

BLOCK_ROWS, REGISTER_ROWS, PLACES = 32, 8, 4  # rows of a block, and of the numbers of one place in all of its lanes
SAMPLE_SHAPE, SAMPLE_GROUP = (64, 128), 64
LARGEST_ERROR = 1e-4  # of a product, beside its largest number


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneOrder:
    """The order of `native/lanes.py`: steps are scale and zero, or a scale alone where all zeros are the middle.

    A zero is what is added for the middle, or of whole zeros what is added to a number, before the scale.
    """

    name: str = "lanes32"
    scales: torch.dtype | None = None  # of those alone, or beside whole zeros, float16 or bf16; None: others are bf16
    has_whole_zeros: bool = False
    num_columns: int = 32  # that activations are rounded together in
    dtypes: ClassVar = (torch.bfloat16, torch.float32)  # of rows

    def runs_on(self, device: torch.device) -> bool:
        """Return whether the kernel is there for this processor, and computes what it should."""
        return device.type == "cpu" and is_available() and _is_right(self)

    def packed(self, numbers: Tensor) -> Tensor:
        """Return numbers uint8 [..., r, i] in memory's order: uint8 [..., r, i / 2]."""
        *front, rows, columns = numbers.shape
        blocks = numbers.reshape(*front, rows // BLOCK_ROWS, PLACES, REGISTER_ROWS, columns // 2, 2)
        lowest, low, high, highest = blocks.movedim(-2, -4).unbind(-3)  # [..., r / 32, i / 2, 8, 2] each
        lanes = torch.stack((lowest | low << 4, high | highest << 4), dim=-1)
        return lanes.reshape(*front, rows, -1)

    def in_columns(self, packed: Tensor, out: Tensor) -> Tensor:
        """Return the numbers of a matrix's rows [r, i / 2], column by column, written to `out`: uint8 [i, r]."""
        lanes = packed.view(-1, len(out) // 2, REGISTER_ROWS, 2, 2)  # [r / 32, i / 2, 8, column, byte]
        numbers = torch.stack((lanes & 15, lanes >> 4), dim=-1)  # of a byte
        places = numbers.permute(1, 3, 0, 4, 5, 2)  # [i / 2, column, r / 32, byte, half, 8]
        out.view(places.shape).copy_(places)
        return out

    def product(self, rows: Tensor, packed: Tensor, steps: Tensor, *, group_size: int) -> Tensor:
        """Return rows [n, i], bf16 or float32, times the numbers with steps, or scales, `in_units`: [n, r]."""
        return self.native(group_size, {"numbers": packed, "steps": steps}).product(rows)

    def native(self, group_size: int, parts: Mapping[str, Any]) -> NativeWeight:
        """Return a weight as its kernel takes it."""
        both, code = (
            (parts["numbers"].contiguous(), parts["steps"].contiguous()),
            _code(self.scales, self.has_whole_zeros),
        )
        rows, columns = both[0].shape[0], both[0].shape[1] * 2
        return weight_of_parts(code, both, rows=rows, columns=columns, more=[group_size], takes_rounded=True)


LANES = LaneOrder()


def in_units(steps: Tensor) -> Tensor:
    """Return steps [..., G, r, k] as they lie beside lanes: [..., r / 32, G * 32 * k]."""
    of_units: Tensor = steps.unflatten(-2, (-1, BLOCK_ROWS)).movedim(-3, -4)
    return of_units.flatten(-3).contiguous()


@functools.cache
def _code(scales: torch.dtype | None, has_whole_zeros: bool) -> Any:
    from offload.native.instructions import WIDE
    from offload.native.lanes import lanes_module

    zeros = "whole" if has_whole_zeros else "none" if scales is not None else "any"
    module = functools.partial(lanes_module, zeros=zeros, in_half=scales == torch.float16)
    return compiled(str(module((8, 6, 5, 4, 3, 2, 1), width=WIDE) if has_wide_registers() else module((2, 1))))


@functools.cache
def _is_right(order: LaneOrder) -> bool:
    """Return whether the kernel's products are those of unpacked weights, for a row alone by bits as among others."""
    rows, columns = SAMPLE_SHAPE
    numbers = torch.arange(rows * columns).mul_(7).remainder_(61).remainder_(16).to(torch.uint8).view(rows, columns)
    scale = torch.linspace(0.5, 1.5, columns // SAMPLE_GROUP * rows).view(-1, rows)
    scale = scale.to(order.scales or torch.bfloat16)
    zero, beside = (1 - scale.float()).bfloat16() * (order.scales is None), [scale]
    if order.has_whole_zeros:
        whole = torch.arange(scale.numel()).remainder_(17).neg_().view_as(scale)
        zero, beside = (8 + whole) * scale.float(), [scale, whole.to(scale.dtype)]
    elif order.scales is None:
        beside = [scale, zero]
    steps = in_units(torch.stack(beside, dim=-1))
    packed, in_groups = order.packed(numbers), (numbers.T.view(-1, SAMPLE_GROUP, rows).float() - 8)
    weights = (in_groups * scale[:, None].float() + zero[:, None].float()).view(columns, rows)
    given = torch.linspace(-1, 1, 7 * columns).sin_().view(7, columns)
    product, alone = (order.product(some, packed, steps, group_size=SAMPLE_GROUP) for some in (given, given[4:5]))
    error = (product - given @ weights).abs().max() / product.abs().max()
    return bool(error < LARGEST_ERROR) and torch.equal(alone, product[4:5])
