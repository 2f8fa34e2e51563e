"""Products with numbers of four bits that stand for sixteen values, in the order of bitsandbytes' CPU kernel.

A block (`row_blocks.py`) has 32 bytes for a pair of columns: byte 2 j + c has column c of row j in its low half, and of
row j + 16 in its high one. Values are whole numbers of 15 bits, a lane's sums of products are exact over as many
columns as 32 bits hold; what is dropped before such sums are added is below 2^-26 of the largest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llvmlite import ir

from offload.native.code import I32, INTS, LANES, SHORTS, Code, Value
from offload.native.instructions import BYTES, WIDE, WIDE_SHORTS, look_up, look_up_shorts
from offload.native.products import UNIT_ROWS, add_products
from offload.native.rounded_rows import BITS, COLUMNS
from offload.native.row_blocks import RowBlock, Sums, add_row_block, scales_at, sums_over_pairs

PAIR_BYTES = 32
HALF_ROWS = UNIT_ROWS // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """What numbers stand for: values / unit."""

    values: tuple[int, ...]
    unit: float

    @property
    def columns(self) -> int:
        """How many columns' products 32 bits hold at least."""
        most, columns = max(map(abs, self.values)) << BITS, COLUMNS
        while columns * most >= 1 << 31:
            columns //= 2
        return columns


def tables_module(table: Table, tiles: Sequence[int], *, width: int = LANES, columns: int = COLUMNS) -> ir.Module:
    """Return the text of products, which take so many activation rows at once, in registers of so many floats.

    A scale is of whole multiples of `columns`, 16 or 32.
    """
    module = ir.Module("tables")
    shift = (min(columns, COLUMNS) // table.columns).bit_length() - 1 if table.columns < columns else 0

    def sums(code: Code, numbers: Value, rows: Sequence[Value]) -> list[Sums]:
        return [
            _sums_of_share(code, table, (numbers, rows), range(first // 2, (first + columns) // 2), (width, shift))
            for first in range(0, COLUMNS, columns)
        ]

    def steps(code: Code, place: Value, _column: Value, first: int) -> tuple[Value, None]:
        scale = scales_at(code, place, first, width, in_half=False)
        return code.fmul(scale, code.splat_of((1 << shift) / table.unit, scale.type)), None

    kind = RowBlock(
        num_bytes=PAIR_BYTES * COLUMNS // 2, step_bytes=2, are_steps_apart=True, width=width, sums=sums, steps=steps
    )
    add_products(module, {rows: add_row_block(module, kind, rows) for rows in tiles})
    return module


def _sums_of_share(
    code: Code, table: Table, given: tuple[Value, Sequence[Value]], pairs: range, facts: tuple[int, int]
) -> Sums:
    """Return sums of products over pairs, of which `table.columns` columns are added before bits are dropped."""
    (numbers, rows), (width, shift) = given, facts
    at_once = table.columns // 2

    def numbers_of(pair: Value) -> list[Value]:
        packed = code.read(BYTES, code.at(numbers, code.mul(pair, code.number(PAIR_BYTES))))
        return (_values if width == LANES else _wide_values)(code, table.values, packed)

    found: Sums = [[] for _ in rows]
    for start in pairs[::at_once]:
        some = range(start, min(start + at_once, pairs.stop))
        sums = sums_over_pairs(code, some, rows, width, numbers_of)
        for of_row, total in zip(sums, found, strict=True):
            kind = of_row[0].type
            _add(code, total, [code.ashr(one, code.splat_of(shift, kind)) for one in of_row] if shift else of_row)
    return [_in_order(code, of_row) if width == LANES else of_row for of_row in found]


def _add(code: Code, totals: list[Value], added: Sequence[Value]) -> None:
    totals[:] = [code.add(*both) for both in zip(totals, added, strict=True)] if totals else added


def _values(code: Code, values: Sequence[int], packed: Value) -> list[Value]:
    """Return what numbers stand for, of rows 0 to 3 and 8 to 11, of 4 to 7 and 12 to 15, and of those 16 below."""
    tables = [ir.Constant(BYTES, [value >> bits & 255 for value in values] * 2) for bits in (0, 8)]
    found = []
    for half in (code.and_(packed, code.splat_of(15, BYTES)), code.lshr(packed, code.splat_of(4, BYTES))):
        both = [look_up(code, table, half) for table in tables]
        for first in (0, 8):
            places = [start + first + place for start in (0, 16) for place in range(8)]
            mask = [place + which * PAIR_BYTES for place in places for which in range(2)]
            found.append(
                code.bitcast(code.shuffle_vector(*both, ir.Constant(ir.VectorType(I32, PAIR_BYTES), mask)), SHORTS)
            )
    return found


def _in_order(code: Code, sums: Sequence[Value]) -> list[Value]:
    """Return the same sums, of eight rows after the other."""
    masks = [ir.Constant(INTS, [*range(first, first + 4), *range(first + 8, first + 12)]) for first in (0, 4)]
    return [code.shuffle_vector(*sums[half : half + 2], mask) for half in (0, 2) for mask in masks]


def _wide_values(code: Code, values: Sequence[int], packed: Value) -> list[Value]:
    """Return what numbers stand for, of the first 16 rows and of the others: five bits are looked up."""
    table = ir.Constant(WIDE_SHORTS, [value & 0xFFFF for value in values] * 2)
    numbers = code.zext(packed, WIDE_SHORTS)
    return [
        look_up_shorts(code, table, number) for number in (numbers, code.lshr(numbers, code.splat_of(4, WIDE_SHORTS)))
    ]


assert HALF_ROWS == WIDE
