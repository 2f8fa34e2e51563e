"""Products with weights that are not packed, bf16 or float32, as they lie, row after row, for rows of float32."""

from __future__ import annotations

from collections.abc import Mapping

from llvmlite import ir

from offload.native.code import FLOAT, I16, I32, I64, POINTER, Code, Value, function
from offload.native.products import NUM_COLUMNS, NUM_ROWS, UNIT_ROWS, add_driver

LANES = 16  # one register, or two: the sums are the same
FLOATS, INTS, SHORTS = (ir.VectorType(kind, LANES) for kind in (FLOAT, I32, I16))
WEIGHTS = 0  # the field of a weight's record that is its address
FLOAT_BYTES = 4


def dense_module(tiles: Mapping[int, int], *, is_bf16: bool) -> ir.Module:
    """Return the text of `multiply`; `tiles` are how many rows it takes at once -> by how many of the weight."""
    module = ir.Module("dense")
    blocks = {rows: _add_block(module, rows, is_bf16=is_bf16, together=together) for rows, together in tiles.items()}
    add_driver(module, blocks, bytes_of_row=lambda code, columns: code.mul(columns, code.number(FLOAT_BYTES)))
    return module


def _add_block(module: ir.Module, num_rows: int, *, is_bf16: bool, together: int) -> ir.Function:
    """Add the product of a unit of the weight with some rows, whose sums go over columns in one order."""
    arguments = {"rows": POINTER, "weight": POINTER, "out": POINTER, "unit": I64}
    given = function(module, f"block_{num_rows}", arguments, is_inner=True)
    code = Code(given["function"])
    columns, all_rows = code.field(given["weight"], NUM_COLUMNS), code.field(given["weight"], NUM_ROWS)
    width = 2 if is_bf16 else FLOAT_BYTES
    weights = code.field(given["weight"], WEIGHTS, POINTER)
    rows = [_row(code, given["rows"], code.number(row), columns, FLOAT_BYTES) for row in range(num_rows)]
    with code.loop(0, UNIT_ROWS, together) as first:
        number = code.add(code.mul(given["unit"], code.number(UNIT_ROWS)), first)
        own = [_row(code, weights, code.add(number, code.number(other)), columns, width) for other in range(together)]
        sums = [[code.variable(code.splat_of(0.0, FLOATS)) for _ in own] for _ in rows]
        with code.loop(0, columns, LANES) as column:
            of_weight = [_floats(code, one, column, is_bf16=is_bf16) for one in own]
            of_rows = [_floats(code, row, column, is_bf16=False) for row in rows]
            for row, of_row in zip(of_rows, sums, strict=True):
                for weight, total in zip(of_weight, of_row, strict=True):
                    total.value = code.intrinsic("llvm.fma.v16f32", FLOATS, weight, row, total.value)
        for row, of_row in enumerate(sums):
            out = _row(code, given["out"], code.number(row), all_rows, FLOAT_BYTES)
            for other, total in enumerate(of_row):
                place = code.shl(code.add(number, code.number(other)), code.number(2))
                code.write(code.sum_of(total.value), out, place, align=4)
    code.ret_void()
    return given["function"]


def _row(code: Code, matrix: Value, number: Value, columns: Value, width: int) -> Value:
    """Return where a row of a matrix begins, whose numbers have so many bytes."""
    return code.at(matrix, code.mul(code.mul(number, columns), code.number(width)))


def _floats(code: Code, row: Value, column: Value, *, is_bf16: bool) -> Value:
    if not is_bf16:
        return code.read(FLOATS, row, code.shl(column, code.number(2)))
    bits = code.zext(code.read(SHORTS, row, code.shl(column, code.number(1))), INTS)
    return code.bitcast(code.shl(bits, code.splat_of(16, INTS)), FLOATS)
