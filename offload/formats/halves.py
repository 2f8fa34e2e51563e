"""Whole numbers of five to eight bits as two of four, which int4's kernel multiplies: 16 * high + low.

A matrix of the high halves stands beside one of the low halves, and rows are multiplied with both: twice as many
columns, 1.25 bytes a weight. One row takes as long as with weights in bf16, which have 2 bytes, and four rows more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from offload.formats.int4 import INT4, MIDDLE, Int4
from offload.formats.packed_format import EvenSteps, Kernel, Packing, Steps, layouts_bytes
from offload.formats.published import PublishedWeight

SHARE_ROWS = 4096  # of a matrix that are put in order together
HALF_BITS = 4
MAX_BITS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelForm:
    """The form in which int4's kernel multiplies a packed matrix, in which it is put when it is loaded."""

    packing: PublishedWeight  # with steps of four bits
    int4: Int4
    shape: tuple[int, int]  # of those: twice as many columns, where numbers have two halves
    has_halves: bool
    kernel: Kernel

    @property
    def num_bytes(self) -> int:
        """The bytes of its parts."""
        return layouts_bytes(self.int4.part_shapes(self.shape))

    def parts_of(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the parts of the same numbers, made of some rows at a time."""
        rows, columns = self.shape
        whole: dict[str, Tensor] = {}
        layouts = self.int4.part_shapes(self.shape)
        for start in range(0, rows, SHARE_ROWS):
            end = min(start + SHARE_ROWS, rows)
            kept = INT4.keeping(self.packing, (end - start, columns))
            assert kept is not None
            for part, made in kept.repack("weight", self.packing.parts_of_rows(parts, start, end)).items():
                size, dtype = layouts[part]
                place = whole.setdefault(part, torch.empty(size, dtype=dtype))
                rows_dim = next((dim for dim, length in enumerate(made.shape) if length != size[dim]), 0)
                first = start * size[rows_dim] // rows
                place.narrow(rows_dim, first, made.shape[rows_dim]).copy_(made)
        return whole


def kernel_form(
    packing: Packing, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> KernelForm | None:
    """Return the form in which a matrix that is packed otherwise is multiplied; None where there is none."""
    steps = packing.even_steps
    if not isinstance(packing, PublishedWeight) or steps is None or len(shape) != 2 or math.prod(shape) == 0:
        return None
    has_halves = HALF_BITS < steps.bits <= MAX_BITS
    if has_halves:
        packing, shape = replace(packing, even_steps=_in_halves(steps)), (shape[0], 2 * shape[1])
    kept = INT4.keeping(packing, shape)
    if kept is None or not isinstance(kept.packing, Int4):
        return None
    kernel = kept.packing.kernel(shape, dtype, device)
    if kernel is None:
        return None
    if has_halves:
        kernel = replace(kernel, multiply=partial(_multiply_twice, kernel))
    rows, columns = shape
    return KernelForm(packing=packing, int4=kept.packing, shape=(rows, columns), has_halves=has_halves, kernel=kernel)


def halves_of(numbers: Tensor, bits: int) -> Tensor:
    """Return numbers [..., i] in halves [..., 2 i]: high ones, which lie around the kernel's middle, then low ones."""
    whole = numbers.to(torch.uint8)
    high = (whole >> HALF_BITS) + (MIDDLE - (1 << bits - HALF_BITS - 1))
    return torch.cat((high, whole & 15), dim=-1)


def _in_halves(steps: EvenSteps) -> EvenSteps:
    """Return the steps of numbers in two halves, all high ones first."""

    def read(parts: Mapping[str, Tensor]) -> Steps:
        whole = steps.read(parts)
        zeros, groups = whole.zeros.float(), whole.groups
        # High halves need no zero, whose rounding would be theirs.
        return Steps(
            numbers=halves_of(whole.numbers, steps.bits),
            zeros=torch.cat((torch.full_like(zeros, MIDDLE), zeros - (1 << steps.bits - 1)), dim=-1),
            scale=torch.cat((whole.scale * 16, whole.scale), dim=-1),
            groups=None if groups is None else torch.cat((groups, groups + steps.num_groups), dim=-1),
        )

    return replace(steps, bits=HALF_BITS, num_groups=2 * steps.num_groups, read=read)


def _multiply_twice(kernel: Kernel, parts: Mapping[str, Tensor], rows: Tensor, bias: Tensor | None) -> Tensor:
    """Return rows [..., i] times high and low halves [r, 2 i]."""
    return kernel.multiply(parts, torch.cat((rows, rows), dim=-1), bias)
