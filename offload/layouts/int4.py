"""Whole numbers of four bits that are multiplied as they are packed: (number - 8) * scale + zero.

`quant=int4` rounds weights to them; those of GPTQ, AWQ and others are repacked. Where our kernel serves, their scales
and whole zeros stay as they are; scales and zeros of others, and in other orders, become bf16.
The order of the numbers in memory is that of the kernel: one of ours, or torch's, which differ from one kind of
processor to another. Its name stands in the parts' names, and the kernel is only given numbers in its own order.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from offload.formats.published import weights_at_once
from offload.formats.storage import (
    WEIGHTS_AT_ONCE,
    PackedStorage,
    PartShapes,
    Quantizer,
    Steps,
    StoredParameter,
    cannot_be_used,
    rows_at_once,
)
from offload.layouts.int4_lanes import BLOCK_ROWS, LaneOrder, in_units
from offload.layouts.int4_orders import NUM_ROWS, ORDERS, BlockOrder, own_order
from offload.layouts.int4_tiles import TILES, TileOrder
from offload.layouts.layout import (
    TREE_ROWS,
    Kernel,
    LosslessLayout,
    Repacked,
    are_few,
    fastest_s,
    in_pieces,
)
from offload.layouts.onednn import in_few_sizes, many_rows_dtype
from offload.layouts.rounding import least_loss, nearest_zeros, rounded_in_shares

Order = BlockOrder | LaneOrder | TileOrder  # of numbers in memory, and the kernel whose order it is
GROUP_SIZE = 32  # columns that share a scale, where we choose
GROUP_SIZES = (32, 64, 128, 256)  # the kernel's
MIDDLE = 8  # the number that the zero of a group stands for
SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)  # of a group's range: outer weights are clipped where that loses less


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4(Quantizer):
    """The facts of one weight."""

    name: str = "int4"
    group_size: int = GROUP_SIZE
    order: Order = field(default_factory=own_order)
    has_columns: bool = False  # the columns of a group are no neighbours in the module's order

    @property
    def variant(self) -> str:
        """What packed weights differ in from one machine to another: the order of the numbers."""
        return self.order.name

    @property
    def scales(self) -> torch.dtype | None:
        """What scales are in that are the weight's own, as their zeros are; None: both are rounded to bf16."""
        return self.order.scales if isinstance(self.order, LaneOrder) else None

    @property
    def has_whole_zeros(self) -> bool:
        """Whether each scale has a whole number beside it, which is added to a number before."""
        return isinstance(self.order, LaneOrder) and self.order.has_whole_zeros

    @property
    def _each(self) -> int:
        """The numbers of a row's group: its scale and zero, or that scale."""
        return 2 if self.scales is None or self.has_whole_zeros else 1

    def _groups_of(self, shape: tuple[int, ...]) -> int:
        """Return the groups of columns for which steps of this shape are."""
        return shape[-1] // (BLOCK_ROWS * self._each) if isinstance(self.order, LaneOrder) else shape[-3]

    def detect(self, weight: StoredParameter) -> Int4 | None:
        """Find the format by its numbers, whose name says their order."""
        order = next((order for order in ORDERS if f"{weight.name}.int4_{order.name}" in weight.stored), None)
        if order is None:
            return None
        for kind in ("scales", "whole_steps") if isinstance(order, LaneOrder) else ():
            if f"{weight.name}.int4_{kind}" in weight.stored:
                scales = weight.dtype_of(f"{weight.name}.int4_{kind}")
                order = LaneOrder(scales=scales, has_whole_zeros=kind == "whole_steps")
        found, columns = replace(self, order=order), weight.shape[-1]
        steps = weight.stored.get(found.stored_names(weight.name)["steps"])
        groups = found._groups_of(steps[0].shape) if steps else 0
        group_size = columns // groups if groups else 0
        if group_size not in GROUP_SIZES or columns % group_size:
            raise weight.cannot_be_used(f"its {columns} columns are no groups of {GROUP_SIZES}")
        has_columns = f"{weight.name}.int4_columns" in weight.stored
        return replace(found, group_size=group_size, has_columns=has_columns)

    def packs(self, shape: tuple[int, ...]) -> bool:
        """Return whether a weight of this shape can be packed: whole blocks of rows, whole groups of columns."""
        columns = shape[-1]
        return shape[-2] % NUM_ROWS == 0 and columns % self.group_size == 0 and columns % self.order.num_columns == 0

    def part_shapes(self, shape: tuple[int, ...]) -> PartShapes:
        """Return the numbers, two a byte, a scale and a zero for each group of each row, and the order of columns."""
        *experts, rows, columns = shape
        groups = columns // self.group_size
        in_order: tuple[int, ...] = (groups, rows, 2)
        if isinstance(self.order, LaneOrder):
            in_order = (rows // BLOCK_ROWS, groups * BLOCK_ROWS * self._each)
        parts: PartShapes = {
            "numbers": ((*experts, rows, columns // 2), torch.uint8),
            "steps": ((*experts, *in_order), self.scales or torch.bfloat16),
        }
        return {**parts, "columns": ((*experts, columns), torch.int32)} if self.has_columns else parts

    def stored_names(self, parameter: str) -> dict[str, str]:
        """Return the names of the parts."""
        kind = "whole_steps" if self.has_whole_zeros else "steps" if self.scales is None else "scales"
        steps = f"{parameter}.int4_{kind}"
        names = {"numbers": f"{parameter}.int4_{self.order.name}", "steps": steps}
        return {**names, "columns": f"{parameter}.int4_columns"} if self.has_columns else names

    def pack(self, weight: Tensor) -> tuple[Int4, dict[str, Tensor]]:
        """Round each group of columns to sixteen even steps between its least and its largest weight.

        Of several narrower ranges the one with the least squared error is taken.
        """
        numbers, scale, zero = rounded_in_shares(weight, functools.partial(nearest_steps, group_size=self.group_size))
        return self, self.parts_of(numbers, scale, zero)

    def parts_of(self, numbers: Tensor, scale: Tensor, zero: Tensor) -> dict[str, Tensor]:
        """Return the parts of numbers [..., r, i] with a scale and a zero for each group [..., r, G]."""
        steps = torch.stack((scale, zero)[: self._each], dim=-1).transpose(-3, -2)
        steps = steps.to(self.scales or torch.bfloat16)
        steps = in_units(steps) if isinstance(self.order, LaneOrder) else steps.contiguous()
        return {"numbers": self.order.packed(numbers).contiguous(), "steps": steps}

    def parts_of_steps(self, parameter: str, steps: Steps, shape: tuple[int, ...]) -> dict[str, Tensor]:
        """Return the parts of a weight with these steps; what is not of the order's dtype becomes bf16."""
        numbers, columns = steps.numbers, None
        if steps.groups is not None:
            columns = steps.groups.argsort(dim=-1, stable=True)  # [n, i]
            sizes = [torch.bincount(groups, minlength=steps.scale.shape[-1]) for groups in steps.groups]
            if any(bool((size != self.group_size).any()) for size in sizes):
                raise cannot_be_used(parameter, f"its groups of columns do not all have {self.group_size}")
            numbers = numbers.gather(-1, columns[:, None].expand_as(numbers))
        scale = steps.scale.float()
        if self.has_whole_zeros:
            zero = -steps.zeros.float()
        else:
            zero = nearest_zeros(numbers, steps.zeros, scale, middle=MIDDLE)
        scale, zero = (part.reshape(*shape[:-1], -1) for part in (scale, zero))
        parts = self.parts_of(numbers.to(torch.uint8).reshape(shape), scale, zero)
        return parts if columns is None else {**parts, "columns": columns.int().view(*shape[:-2], -1)}

    def unpack(self, parts: Mapping[str, Tensor], out: Tensor) -> Tensor:
        """Unpack some blocks of rows at a time: each weight is rounded once."""
        rows, columns = out.shape[-2:]
        numbers = parts["numbers"].view(-1, rows, columns // 2)
        steps = parts["steps"].view(len(numbers), -1)
        places = parts["columns"].view(-1, columns).argsort() if self.has_columns else None
        dtype = self._computed_in(out.dtype, out.device)
        for matrix, whole in enumerate(out.view(-1, rows, columns)):
            first = 0
            for weights in self._columns(numbers[matrix], steps[matrix], dtype):
                ordered = weights if places is None else weights[places[matrix]]
                whole[first : first + weights.shape[1]] = ordered.to(out.dtype).T
                first += weights.shape[1]
        return out

    def _columns(self, numbers: Tensor, steps: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
        """Yield the weights of some rows of a matrix at a time, column by column: [i, r], each in the same memory."""
        columns = numbers.shape[1] * 2
        at_once = rows_at_once(max(WEIGHTS_AT_ONCE, weights_at_once(numbers.device)), columns, step=NUM_ROWS)
        unit_rows = BLOCK_ROWS if isinstance(self.order, LaneOrder) else len(numbers)
        of_units = steps.to(dtype).view(-1, columns // self.group_size, unit_rows, self._each)
        scales, *zeros = of_units.permute(3, 1, 0, 2).flatten(2).contiguous()[:, :, None]  # [G, 1, r] each
        shares = numbers.split(at_once)
        places = numbers.new_empty(shares[0].numel() * 2)
        weights = torch.empty_like(places, dtype=dtype)
        in_shares = (part.split(at_once, -1) for part in (scales, *zeros))
        for share, scale, *zero in zip(shares, *in_shares, strict=True):
            found = self.order.in_columns(share, places[: share.numel() * 2].view(columns, -1)).view(torch.int8)
            groups = weights[: found.numel()].view(-1, self.group_size, len(share))
            if self.has_whole_zeros:
                yield groups.copy_(found.view_as(groups)).add_(zero[0]).mul_(scale).flatten(0, 1)
                continue
            groups.copy_(found.sub_(MIDDLE).view_as(groups))
            yield (torch.addcmul(zero[0], groups, scale, out=groups) if zero else groups.mul_(scale)).flatten(0, 1)

    def _computed_in(self, dtype: torch.dtype, device: torch.device) -> torch.dtype:
        """Return what weights of this dtype are computed in: a card rounds products of bf16, a CPU only their sum."""
        is_summed_wide = (dtype, device.type) == (torch.bfloat16, "cpu") and self.scales != torch.float16
        return torch.bfloat16 if is_summed_wide else torch.float32

    def multiply(self, few: int, parts: Mapping[str, Tensor], rows: Tensor, bias: Tensor | None) -> Tensor:
        """Return rows [..., i] times the weight, and the bias: few rows with the numbers as they are packed."""
        flat = rows.reshape(-1, rows.shape[-1])
        if self.has_columns:
            flat = flat.index_select(-1, parts["columns"])
        if are_few(len(flat), few):
            product = in_pieces(functools.partial(self.multiply_packed, parts), flat, few)
        else:
            product = self.multiply_unpacked(parts, flat)
        return (product if bias is None else product.add_(bias)).view(*rows.shape[:-1], -1)

    def multiply_packed(self, parts: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        """Return rows [n, i], in memory's order of columns, times the weight: [n, r]."""
        return self.order.product(rows, parts["numbers"], parts["steps"], group_size=self.group_size)

    def multiply_unpacked(self, parts: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        """Return the same by weights that are unpacked: faster for many rows."""
        product = rows.new_empty(len(rows), len(parts["numbers"]))
        dtype = many_rows_dtype(rows.dtype, rows.device)
        num_rows, first = len(rows), 0
        rows = in_few_sizes(rows.to(dtype))
        for weights in self._columns(parts["numbers"], parts["steps"], self._computed_in(dtype, rows.device)):
            last = first + weights.shape[1]
            product[:, first:last] = (rows @ weights.to(dtype))[:num_rows]
            first = last
        return product


def nearest_steps(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return numbers, scales and zeros of weights [r, i]: of those that SHRINKS gives a group, the nearest."""
    groups = weight.float().unflatten(-1, (-1, group_size))  # [r, G, g]
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)

    def tries() -> Iterator[tuple[Tensor, ...]]:
        for shrink in SHRINKS:
            centre, width = (low + high) / 2, (high - low) * shrink
            scale = (width / 15).to(torch.bfloat16).float()  # as it is stored, so that numbers are chosen for it
            zero = (centre + scale * (MIDDLE - 7.5)).to(torch.bfloat16).float()
            steps = torch.where(scale > 0, scale, 1.0)
            numbers = ((groups - zero) / steps).add_(MIDDLE).round_().clamp_(0, 15)
            loss = (torch.addcmul(zero, numbers - MIDDLE, scale) - groups).square_().sum(-1, keepdim=True)
            yield loss, numbers, scale, zero

    numbers, scale, zero = least_loss(tries())
    return numbers.flatten(-2).to(torch.uint8), scale.squeeze(-1), zero.squeeze(-1)


TIMED_SHAPES = {"cpu": (512, 2048), "cuda": (4096, 4096)}  # of the weight: a smaller one lets a card wait for its host
# Far from each other, so that two starts on one machine choose the same; a prompt has thousands of rows
FEW_ROWS = {"cpu": (TREE_ROWS,), "cuda": (4, 16, 64, 256, 1024)}


@functools.cache
def rows_that_are_few(order: Order, device: torch.device) -> int:
    """Return the number of rows above which products with unpacked weights are faster, as timed here.

    Kernels that are compiled here are as fast at any number, and rows of a prompt then have the bits of a tree's.
    """
    if isinstance(order, LaneOrder):
        return sys.maxsize
    if device.type == "cuda" and not torch.cuda.device_count():  # only planned for
        return FEW_ROWS["cuda"][1]
    packing = Int4(order=order)
    shape = TIMED_SHAPES[device.type]
    parts = {
        name: torch.ones(size, dtype=dtype, device=device) for name, (size, dtype) in packing.part_shapes(shape).items()
    }

    def unpacking_wins(num_rows: int) -> bool:
        rows = torch.ones(num_rows, shape[1], dtype=torch.bfloat16, device=device)
        packed_s = fastest_s(lambda: packing.multiply_packed(parts, rows))
        return fastest_s(lambda: packing.multiply_unpacked(parts, rows)) < packed_s

    return next((few for few in FEW_ROWS[device.type] if unpacking_wins(2 * few)), sys.maxsize)


def _kernel(stored: PackedStorage, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Kernel | None:
    """Return the product of the numbers' order, whose rows have the same bits whatever rows stand beside them.

    torch's multiplies many rows with unpacked weights, of some rows at a time.
    """
    if not isinstance(stored, Int4) or len(shape) != 2 or dtype not in stored.order.dtypes:
        return None
    if not stored.order.runs_on(device):
        return None
    native = None
    if isinstance(stored.order, LaneOrder) and not stored.has_columns:
        native = functools.partial(stored.order.native, stored.group_size)
    return Kernel(multiply=functools.partial(stored.multiply, rows_that_are_few(stored.order, device)), native=native)


def _repacked(stored: PackedStorage, shape: tuple[int, ...], device: torch.device | None) -> Repacked | None:
    """Return how a weight is repacked, whose numbers have four bits and groups that the kernel knows.

    Matrices that make up one expert's, or a layer's, may not each have an order of columns of its own.
    """
    steps = stored.even_steps
    if steps is None:
        return None
    group_size, rest = divmod(shape[-1], steps.num_groups)
    order = TILES if device is not None and device.type == "cuda" else INT4.order
    if isinstance(order, LaneOrder):
        has_whole_zeros = steps.scales is not None and not steps.is_middle
        order = replace(order, scales=steps.scales, has_whole_zeros=has_whole_zeros)
    own = Int4(group_size=group_size, order=order, has_columns=not steps.in_order)
    has_one_order = steps.in_order or steps.num_matrices == math.prod(shape[:-2])
    if steps.bits != 4 or rest or group_size not in GROUP_SIZES or not own.packs(shape) or not has_one_order:
        return None
    return Repacked(
        storage=own, repack=lambda parameter, parts: own.parts_of_steps(parameter, steps.read(parts), shape)
    )


INT4 = Int4()
INT4_LAYOUT = LosslessLayout(own=INT4, kernel=_kernel, repacked=_repacked, detect=INT4.detect)
