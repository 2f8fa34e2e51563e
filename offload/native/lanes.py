"""Products with whole numbers of four bits, in an order of memory whose lanes need one instruction for each number.

A block (`row_blocks.py`) has 32 bytes for a pair of columns. A lane of 16 bits, of number l, has in
its p-th four bits row 8 p + l / 2 of the block and column l % 2 of the pair. A number stays where it stands in the
lane: its factor 16^p goes into the scale, which has a zero beside it in memory, or stands alone. `vpmaddwd`
multiplies sixteen numbers by as many of a rounded row. Registers of 512 bits take two places at once, and of a row
alone two pairs of columns, whose sums are added: whole numbers have no order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from offload.native.code import FLOAT, FLOATS, HALF, I16, I32, I64, INTS, LANES, SHORTS, Code, Value
from offload.native.instructions import WIDE, multiply_pairs
from offload.native.products import UNIT_ROWS, add_products
from offload.native.rounded_rows import COLUMNS
from offload.native.row_blocks import RowBlock, Sums, add_row_block, scales_at, sums_over_pairs

PLACES = 4  # numbers of four bits in a lane
LAST_SHIFT = 12  # which leaves the last place alone
FACTORS = (1.0, 1 / 16, 1 / 256, 1.0)  # of a number that stands there; the last is shifted down
WIDE_FACTORS = (
    1.0,
    1 / 16,
    1.0,
    1 / 16,
)  # of registers of 512 bits, in which the last two are shifted down by eight bits
MIDDLE = 8.0  # the number that a group's zero stands for
HIGH_HALF = -65536  # of 32 bits
PAIRS = ir.VectorType(I64, LANES)  # of pairs of columns, in such a register
WIDE_INTS, WIDE_SHORTS = ir.VectorType(I32, WIDE), ir.VectorType(I16, 2 * WIDE)


def lanes_module(tiles: Sequence[int], *, width: int = LANES, zeros: str = "any", in_half: bool = False) -> ir.Module:
    """Return the text of products, which take so many activation rows at once, in registers of so many floats.

    Zeros are "any", bf16 as their scales, which are added for MIDDLE; "whole" numbers that are added before scales, of
    float16 as these perhaps; or "none": MIDDLE stands for zero in all groups, and scales may be of float16.
    """
    module = ir.Module("lanes")

    def sums(code: Code, numbers: Value, rows: Sequence[Value]) -> list[Sums]:
        return [(_whole_numbers if width == LANES else _wide_whole_numbers)(code, numbers, rows)]

    def steps(code: Code, place: Value, _column: Value, first: int) -> tuple[Value, Value]:
        if zeros == "none":
            scale = scales_at(code, place, first, width, in_half=in_half)
            return _in_places(code, scale, first), code.fmul(scale, code.splat_of(-MIDDLE, scale.type))
        return _steps(code, place, first, width, is_whole=zeros == "whole", in_half=in_half)

    kind = RowBlock(
        num_bytes=COLUMNS * UNIT_ROWS // 2, step_bytes=2 if zeros == "none" else 4, width=width, sums=sums, steps=steps
    )
    add_products(module, {rows: add_row_block(module, kind, rows) for rows in tiles})
    return module


def _whole_numbers(code: Code, numbers: Value, rows: Sequence[Value]) -> Sums:
    """Return the sums of products of 32 columns, for each row and place: whole numbers of 32 bits."""

    def numbers_of(pair: Value) -> list[Value]:
        lanes = code.read(SHORTS, code.at(numbers, code.mul(pair, code.number(2 * SHORTS.count))))
        return _of_places(code, lanes, (0, 0, 0, LAST_SHIFT))

    return sums_over_pairs(code, range(COLUMNS // 2), rows, LANES, numbers_of)


def _wide_whole_numbers(code: Code, numbers: Value, rows: Sequence[Value]) -> Sums:
    """Return the same, for each row and two places: a register has both, and stands for sixteen rows of the weight."""
    if len(rows) == 1:
        return [_of_one_row(code, numbers, rows[0])]
    masks = ir.Constant(WIDE_SHORTS, [15] * SHORTS.count + [15 << 4] * SHORTS.count)
    twice = ir.Constant(WIDE_INTS, 2 * list(range(LANES)))

    def numbers_of(pair: Value) -> list[Value]:
        ints = code.read(INTS, code.at(numbers, code.mul(pair, code.number(2 * SHORTS.count))))
        lanes = code.bitcast(code.shuffle_vector(ints, ints, twice), WIDE_SHORTS)
        return [code.and_(one, masks) for one in (lanes, code.lshr(lanes, code.splat_of(8, WIDE_SHORTS)))]

    return sums_over_pairs(code, range(COLUMNS // 2), rows, WIDE, numbers_of)


def _of_one_row(code: Code, numbers: Value, row: Value) -> list[Any]:
    """Return the same of a row alone: two pairs of columns at once need fewer instructions, but more sums."""
    found: list[Any] = [None] * PLACES
    in_turn = [half * LANES + lane for lane in range(LANES) for half in range(2)]
    for pair in range(0, COLUMNS // 2, 2):
        both = code.read(WIDE_INTS, numbers, 2 * SHORTS.count * pair)  # a pair of columns, and then the next
        lanes = code.bitcast(code.shuffle_vector(both, both, ir.Constant(WIDE_INTS, in_turn)), WIDE_SHORTS)
        columns = code.bitcast(code.splat(code.read(I64, row, 4 * pair, align=4), PAIRS.count), WIDE_SHORTS)
        for place, own in enumerate(_of_places(code, lanes, (0, 0, 8, 8))):
            product, before = multiply_pairs(code, own, columns), found[place]
            found[place] = product if before is None else code.add(before, product)
    firsts, seconds = (ir.Constant(WIDE_INTS, list(range(start, 2 * WIDE, 2))) for start in (0, 1))
    return [
        code.add(*(code.shuffle_vector(found[place], found[place + 1], half) for half in (firsts, seconds)))
        for place in range(0, PLACES, 2)
    ]


def _of_places(code: Code, lanes: Value, shifts: Sequence[int]) -> list[Value]:
    """Return the numbers of each place, shifted down by so many bits."""
    moved = {shift: code.lshr(lanes, code.splat_of(shift, lanes.type)) if shift else lanes for shift in set(shifts)}
    return [
        moved[shift]
        if shift == LAST_SHIFT
        else code.and_(moved[shift], code.splat_of(15 << 4 * place - shift, lanes.type))
        for place, shift in enumerate(shifts)
    ]


def _steps(code: Code, steps: Value, first: int, width: int, *, is_whole: bool, in_half: bool) -> tuple[Value, Value]:
    """Return what the numbers of some rows are multiplied by, and what each column adds beside."""
    ints, floats = ir.VectorType(I32, width), ir.VectorType(FLOAT, width)
    if in_half:
        halves = code.read(ir.VectorType(HALF, 2 * width), steps, 4 * first, align=4)
        both = code.fpext(halves, ir.VectorType(FLOAT, 2 * width))
        places = (ir.Constant(ints, list(range(start, 2 * width, 2))) for start in (0, 1))
        step, zero = (code.shuffle_vector(both, both, place) for place in places)
    else:
        pairs = code.read(ints, steps, 4 * first, align=4)  # of scale and zero, bf16 each
        step = code.bitcast(code.shl(pairs, code.splat_of(16, ints)), floats)
        zero = code.bitcast(code.and_(pairs, code.splat_of(HIGH_HALF, ints)), floats)
    zero = code.fmul(step, zero) if is_whole else code.fused(step, code.splat_of(-MIDDLE, floats), zero)
    return _in_places(code, step, first), zero


def _in_places(code: Code, step: Value, first: int) -> Value:
    """Return the steps of numbers of some rows as they stand in their lanes."""
    width = step.type.count
    of_places = FACTORS if width == LANES else WIDE_FACTORS
    factors = [of_places[row // LANES] for row in range(first, first + width)]
    return code.fmul(step, ir.Constant(step.type, factors))


assert I16.width * SHORTS.count == I32.width * INTS.count
assert FLOATS.count == LANES
