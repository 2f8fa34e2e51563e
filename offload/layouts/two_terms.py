"""Numbers of more than four bits as sums of two that have four: a CPU's kernel then multiplies them as they are packed.

A weight [r, i] is packed as both terms side by side, [r, 2 i], and rows are multiplied with it twice over. That is one
product, which is summed in float32 and rounded once. The numbers of MXFP4 and NVFP4 are sums of zero, one, two and four
with twice another of these, which bitsandbytes' fp4 has all; elsewhere their terms have steps of 16 and of one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from offload.formats.storage import (
    WEIGHTS_AT_ONCE,
    EvenSteps,
    PackedStorage,
    PartShapes,
    Steps,
    StoredParameter,
    rows_at_once,
)
from offload.layouts.int4 import GROUP_SIZES, INT4, INT4_LAYOUT, MIDDLE, Int4
from offload.layouts.layout import Kernel, LosslessLayout, Repacked
from offload.layouts.nf4_cpu import BLOCK_SIZES, NF4_CPU, NF4_CPU_LAYOUT, Nf4Cpu
from offload.layouts.onednn import many_rows_dtype
from offload.layouts.rounding import nearest_zeros

Term = Int4 | Nf4Cpu
FIELD = "two_terms"  # in the names of the parts
ROWS_DIMS = {"numbers": -2, "steps": -2, "scales": -1}  # the dimension of a part that follows the matrix's rows
FEW_ROWS = {Int4: 96, Nf4Cpu: 192}  # measured: more rows are multiplied sooner with unpacked weights
BLOCK_ROWS = 64  # whole blocks of either kernel
HALF_BITS = 4
FP4 = replace(NF4_CPU, kind="fp4")
# bitsandbytes' numbers for quarters of its largest value
FP4_NUMBERS = {0: 0, 1: 7, 2: 5, 4: 3}
# The whole numbers that are twice one term and another
FP4_SUMS = {2 * first + second: (first, second) for first, second in
            ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 2), (4, 0), (4, 4))}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoTerms(PackedStorage):
    """The facts of one weight."""

    name: str
    term: Term  # whose columns are those of both

    @property
    def variant(self) -> str:
        """What packed weights differ in from one machine to another."""
        return f"{self.name} {self.term.variant}" if _is_possible(self.term) else ""

    def detect(self, weight: StoredParameter) -> TwoTerms | None:
        """Find the format by the parts of the terms."""
        *front, columns = weight.shape
        both = replace(weight, name=f"{weight.name}.{FIELD}", shape=(*front, 2 * columns))
        term = self.term.detect(both)
        return None if term is None else replace(self, term=term)

    def part_shapes(self, shape: tuple[int, ...]) -> PartShapes:
        """Return the parts of both terms."""
        return self.term.part_shapes(_both(shape))

    def stored_names(self, parameter: str) -> dict[str, str]:
        """Return the names of the parts."""
        return self.term.stored_names(f"{parameter}.{FIELD}")

    def unpack(self, parts: Mapping[str, Tensor], out: Tensor) -> Tensor:
        """Unpack some rows of both terms at a time, in float32, and round their sums once."""
        rows, columns = out.shape[-2:]
        shapes = self.part_shapes((rows, columns))
        matrices = {name: parts[name].view(-1, *shape) for name, (shape, _) in shapes.items()}
        num_rows = rows_at_once(WEIGHTS_AT_ONCE, 2 * columns, step=BLOCK_ROWS)
        for matrix, whole in enumerate(out.view(-1, rows, columns)):
            for first in range(0, rows, num_rows):
                place = whole[first : first + num_rows]
                share = {}
                for name, part in matrices.items():
                    size = part.shape[ROWS_DIMS[name]]  # one for each row, or for some
                    ends = (first * size // rows, len(place) * size // rows)
                    share[name] = part[matrix].narrow(ROWS_DIMS[name], *ends).contiguous()
                both = torch.empty(len(place), 2 * columns, device=out.device)
                torch.add(*self.term.unpack(share, both).chunk(2, dim=-1), out=place)
        return out


def _both(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of both terms side by side."""
    return (*shape[:-1], 2 * shape[-1])


def halves_of(numbers: Tensor, bits: int) -> Tensor:
    """Return numbers [..., i] in halves [..., 2 i]: high ones, which lie around the kernel's middle, then low ones."""
    whole = numbers.to(torch.uint8)
    high = (whole >> HALF_BITS) + (MIDDLE - (1 << bits - HALF_BITS - 1))
    return torch.cat((high, whole & 15), dim=-1)


def _halves(facts: EvenSteps, steps: Steps) -> tuple[Tensor, ...]:
    """Return the upper and the lower four bits, and zeros that miss only what rounding takes from their sum."""
    numbers, scale = halves_of(steps.numbers, facts.bits), steps.scale.float()
    upper = MIDDLE + (steps.zeros.float() - (1 << facts.bits - 1) - MIDDLE) / 16  # all of the weight's zero
    scales = torch.cat((16 * scale, scale), -1)
    zeros = nearest_zeros(numbers, torch.cat((upper, torch.full_like(upper, MIDDLE)), -1), scales, middle=MIDDLE)
    high, low = zeros.chunk(2, dim=-1)
    rounded = high.to(torch.bfloat16).float()
    return numbers, scales, torch.cat((rounded, low + (high - rounded)), -1)


def _sums(facts: EvenSteps, steps: Steps) -> tuple[Tensor, ...]:
    """Return the numbers of which the first counts twice."""
    assert facts.numbers is not None
    least, most = min(facts.numbers), max(facts.numbers)
    device = steps.numbers.device
    tables = torch.zeros(2, most - least + 1, dtype=torch.uint8, device=device)
    for number in facts.numbers:
        sign = 8 if number < 0 else 0
        for table, term in zip(tables, FP4_SUMS[abs(number)], strict=True):
            table[number - least] = FP4_NUMBERS[term] + (sign if term else 0)
    places = steps.numbers.reshape(-1).int()
    first, second = (table.index_select(0, places).view(steps.numbers.shape) for table in tables)
    # The largest value of bitsandbytes is four steps.
    return torch.cat((first, second), -1), torch.cat((8 * steps.scale, 4 * steps.scale), -1)


def _is_possible(term: Term) -> bool:
    """Return whether this is a processor for the terms; on others even steps are for int4."""
    sample = (BLOCK_ROWS, 2 * BLOCK_ROWS)
    return isinstance(term, Int4) or _term_kernel(term, sample, torch.bfloat16, torch.device("cpu")) is not None


def _term_kernel(term: Term, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Kernel | None:
    """Return the kernel that multiplies a term's columns side by side."""
    layout = INT4_LAYOUT if isinstance(term, Int4) else NF4_CPU_LAYOUT
    return layout.kernel(term, _both(shape), dtype, device)


def _kernel(stored: PackedStorage, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Kernel | None:
    """Return the terms' product, which is given rows twice over; it has the same bits for a row as theirs.

    Processors without bf16 multiply many rows sooner by the terms than by the unpacked weight. For a weight that is
    never unpacked as many rows as there are are the term's own matter.
    """
    kernel = _term_kernel(stored.term, shape, dtype, device) if isinstance(stored, TwoTerms) else None
    if kernel is None:
        return None
    assert isinstance(stored, TwoTerms)
    term, of_both = stored.term, kernel.multiply

    def of_any_rows(parts: Mapping[str, Tensor], rows: Tensor, bias: Tensor | None) -> Tensor:
        return of_both(parts, torch.cat((rows, rows), -1), bias)

    def multiply(parts: Mapping[str, Tensor], rows: Tensor, bias: Tensor | None) -> Tensor:
        flat = rows.reshape(-1, rows.shape[-1])
        product = term.multiply_packed(parts, torch.cat((flat, flat), dim=-1))
        return (product if bias is None else product.add_(bias)).view(*rows.shape[:-1], -1)

    if many_rows_dtype(dtype, device) != dtype:
        return replace(kernel, multiply=of_any_rows)
    return Kernel(multiply=multiply, max_rows=FEW_ROWS[type(term)], of_any_rows=of_any_rows)


def _splits(own: TwoTerms, steps: EvenSteps, *, is_for_files: bool) -> bool:
    """Return whether numbers are sums of such terms; halves of those without a list are made at load alone."""
    if isinstance(own.term, Int4):
        return HALF_BITS < steps.bits <= 2 * HALF_BITS and not (is_for_files and steps.numbers is None)
    is_sum = steps.numbers is not None and {*map(abs, steps.numbers)} <= FP4_SUMS.keys()
    return is_for_files and is_sum and _is_possible(own.term)


def _repacked(
    stored: PackedStorage, shape: tuple[int, ...], device: torch.device | None, *, own: TwoTerms
) -> Repacked | None:
    """Return how a weight is repacked, whose numbers are sums of two terms, in groups that the kernel knows.

    Parts are made expert by expert: their numbers take memory.
    """
    steps = stored.even_steps
    if steps is None or not steps.in_order or not _splits(own, steps, is_for_files=device is None):
        return None
    group_size, rest = divmod(shape[-1], steps.num_groups)
    is_int4 = isinstance(own.term, Int4)
    term: Term = replace(INT4, group_size=group_size) if is_int4 else replace(FP4, block_size=group_size)
    if rest or group_size not in (GROUP_SIZES if is_int4 else BLOCK_SIZES) or not term.packs(shape):
        return None
    *experts, rows, _ = shape
    num_experts, split = math.prod(experts), _halves if is_int4 else _sums

    def repack(_name: str, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        made: list[dict[str, Tensor]] = []
        for expert in range(num_experts):
            share = {
                name: part if num_experts == 1 else part.chunk(num_experts)[expert] for name, part in parts.items()
            }
            made.append(term.parts_of(*(part.reshape(rows, -1) for part in split(steps, steps.read(share)))))
        return {
            name: torch.cat([found[name] for found in made]).view(*experts, *made[0][name].shape) for name in made[0]
        }

    return Repacked(storage=replace(own, term=term), repack=repack)


def _layout(own: TwoTerms) -> LosslessLayout:
    return LosslessLayout(
        own=own, kernel=_kernel, repacked=partial(_repacked, own=own), detect=own.detect, is_slow=True
    )


FP4_TWICE = TwoTerms(name="fp4-twice", term=FP4)
INT4_TWICE = TwoTerms(name="int4-twice", term=INT4)
FP4_TWICE_LAYOUT, INT4_TWICE_LAYOUT = _layout(FP4_TWICE), _layout(INT4_TWICE)
