"""Products with numbers of a byte as they lie, row after row, for rows of float32: nothing is rounded before.

They are float8 (E4M3), or whole numbers.

A scale belongs to a block of rows and columns: sums over a block's columns are multiplied by it.
"""

from __future__ import annotations

from collections.abc import Mapping

from llvmlite import ir

from offload.native.code import FLOAT, HALF, I8, I16, I32, I64, POINTER, Code, Value, function
from offload.native.products import NUM_COLUMNS, NUM_ROWS, UNIT_ROWS, add_driver, add_work

LANES = 16  # one register, or two: the sums are the same
FLOATS, HALVES, SHORTS, INTS = (ir.VectorType(kind, LANES) for kind in (FLOAT, HALF, I16, I32))
NUMBERS, SCALES, _, _, BLOCK_ROWS, BLOCK_COLUMNS, SCALES_EACH = range(7)  # fields of a weight's record
FLOAT_BYTES = 4
LESS = 2.0**8  # a half of the same bits is so many times smaller
NO_NUMBER = 0x7F


def float8_module(tiles: Mapping[int, int], *, are_whole: bool = False) -> ir.Module:
    """Return the text of products; `tiles` are how many rows they take at once -> by how many of the weight."""
    module = ir.Module("float8")
    blocks = {rows: _add_block(module, rows, together, are_whole) for rows, together in tiles.items()}
    multiply = add_driver(
        module, blocks, bytes_of_row=lambda code, columns: code.mul(columns, code.number(FLOAT_BYTES))
    )
    add_work(module, None, multiply)
    return module


def _add_block(module: ir.Module, num_rows: int, together: int, are_whole: bool) -> ir.Function:
    """Add the product of a unit of the weight with some rows, whose sums go over columns in one order."""
    arguments = {"rows": POINTER, "weight": POINTER, "out": POINTER, "unit": I64}
    given = function(module, f"block_{num_rows}", arguments, is_inner=True)
    code, weight = Code(given["function"]), given["weight"]
    columns, all_rows, high, wide, scales_each = (
        code.field(weight, place) for place in (NUM_COLUMNS, NUM_ROWS, BLOCK_ROWS, BLOCK_COLUMNS, SCALES_EACH)
    )
    numbers, scales = (code.field(weight, place, POINTER) for place in (NUMBERS, SCALES))
    zero = code.splat_of(0.0, FLOATS)
    with code.loop(0, UNIT_ROWS, together) as first:
        own = [
            code.add(code.mul(given["unit"], code.number(UNIT_ROWS)), code.add(first, code.number(other)))
            for other in range(together)
        ]
        totals = [[code.variable(zero) for _ in own] for _ in range(num_rows)]
        sums = [[code.variable(zero) for _ in own] for _ in range(num_rows)]
        with code.loop(0, scales_each) as block:
            start = code.mul(block, wide)
            end = code.intrinsic("llvm.smin.i64", I64, code.add(start, wide), columns)
            for one in (one for of_row in sums for one in of_row):
                one.value = zero
            with code.loop(start, end, LANES) as column:
                places = [code.add(code.mul(row, columns), column) for row in own]
                of_weight = [(_whole if are_whole else _floats)(code, numbers, place) for place in places]
                for row, of_row in enumerate(sums):
                    place = code.add(code.mul(columns, code.number(row)), column)
                    values = code.read(FLOATS, given["rows"], code.shl(place, code.number(2)))
                    for factors, total in zip(of_weight, of_row, strict=True):
                        total.value = code.fused(factors, values, total.value)
            for other, row in enumerate(own):
                place = code.add(code.mul(code.udiv(row, high), scales_each), block)
                scale = code.splat(code.read(FLOAT, scales, code.shl(place, code.number(2))), LANES)
                for of_row, whole in zip(sums, totals, strict=True):
                    whole[other].value = code.fused(of_row[other].value, scale, whole[other].value)
        for number, whole in enumerate(totals):
            for row, total in zip(own, whole, strict=True):
                place = code.add(code.mul(all_rows, code.number(number)), row)
                found = code.fmul(code.sum_of(total.value), ir.Constant(FLOAT, 1.0 if are_whole else LESS))
                code.write(found, given["out"], code.shl(place, code.number(2)), align=4)
    code.ret_void()
    return given["function"]


def _whole(code: Code, numbers: Value, place: Value) -> Value:
    """Return 16 whole numbers."""
    return code.sitofp(code.sext(code.read(ir.VectorType(I8, LANES), numbers, place), INTS), FLOATS)


def _floats(code: Code, numbers: Value, place: Value) -> Value:
    """Return 16 numbers, smaller by LESS: a half has one bit more of an exponent and seven more of a fraction."""
    bits = code.zext(code.read(ir.VectorType(I8, LANES), numbers, place), SHORTS)
    size = code.and_(bits, code.splat_of(NO_NUMBER, SHORTS))
    sign = code.shl(code.and_(bits, code.splat_of(0x80, SHORTS)), code.splat_of(8, SHORTS))
    halves = code.or_(code.shl(size, code.splat_of(7, SHORTS)), sign)
    is_none = code.icmp_unsigned("==", size, code.splat_of(NO_NUMBER, SHORTS))
    halves = code.select(is_none, code.splat_of(0x7E00, SHORTS), halves)
    return code.fpext(code.bitcast(halves, HALVES), FLOATS)
