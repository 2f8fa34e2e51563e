"""Products with numbers of a byte, for weights that stay in memory: blocks as they lie are slower for many rows.

A block (`row_blocks.py`) has 64 bytes for a pair of columns: byte 2 j + c has column c of row j. What a number is
multiplied by is a float16 number for each 32 columns, or for each 256 and a factor of a byte for each 16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from offload.native.code import I8, I16, I32, LANES, Code, Value
from offload.native.products import UNIT_ROWS, add_products
from offload.native.rounded_rows import COLUMNS
from offload.native.row_blocks import RowBlock, Sums, add_row_block, scales_at, sums_over_pairs

PAIR_BYTES = 2 * UNIT_ROWS
FACTOR_COLUMNS = 16
NUM_FACTORS = 16  # of 256 columns
STEP_BYTES = {False: 2, True: NUM_FACTORS + 2}  # of a row, without factors and with them


def bytes_module(tiles: Sequence[int], *, width: int = LANES, has_factors: bool = False) -> ir.Module:
    """Return the text of products, which take so many activation rows at once, in registers of so many floats."""
    module = ir.Module("bytes")
    columns = FACTOR_COLUMNS if has_factors else COLUMNS

    def sums(code: Code, numbers: Value, rows: Sequence[Value]) -> list[Sums]:
        return [
            sums_over_pairs(
                code, range(first // 2, (first + columns) // 2), rows, width,
                lambda pair: _numbers_of(code, numbers, pair, width),
            )
            for first in range(0, COLUMNS, columns)
        ]  # fmt: skip

    kind = RowBlock(
        num_bytes=PAIR_BYTES * COLUMNS // 2,
        step_bytes=STEP_BYTES[has_factors],
        width=width,
        sums=sums,
        steps=_steps_with_factors(width) if has_factors else _steps(width),
    )
    add_products(module, {rows: add_row_block(module, kind, rows) for rows in tiles})
    return module


def _numbers_of(code: Code, numbers: Value, pair: Value, width: int) -> list[Value]:
    """Return the numbers of a pair of columns, of 32 rows of the weight."""
    lanes, own = 2 * width, code.at(numbers, code.mul(pair, code.number(PAIR_BYTES)))
    return [
        code.sext(code.read(ir.VectorType(I8, lanes), own, place), ir.VectorType(I16, lanes))
        for place in range(0, PAIR_BYTES, lanes)
    ]


def _steps(width: int) -> Callable[[Code, Value, Value, int], tuple[Value, None]]:
    def steps(code: Code, place: Value, _column: Value, first: int) -> tuple[Value, None]:
        return scales_at(code, place, first, width, in_half=True), None

    return steps


def _steps_with_factors(width: int) -> Callable[[Code, Value, Value, int], tuple[Value, None]]:
    of_halves = _steps(width)

    def steps(code: Code, place: Value, column: Value, first: int) -> tuple[Value, None]:
        number = code.and_(code.lshr(column, code.number(4)), code.number(NUM_FACTORS - 1))
        factors = code.read(ir.VectorType(I8, width), code.at(place, code.mul(number, code.number(UNIT_ROWS))), first)
        scale, _ = of_halves(code, code.at(place, NUM_FACTORS * UNIT_ROWS), column, first)
        return code.fmul(code.sitofp(code.sext(factors, ir.VectorType(I32, width)), scale.type), scale), None

    return steps
