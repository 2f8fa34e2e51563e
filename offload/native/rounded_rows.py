"""Rows of activations become whole numbers of 15 bits, with a power of two for each 32 columns.

A number of bf16 within a factor of 64 of the largest beside it stays as it is; others are off by 2^-14 of the largest
at most. Products with whole numbers of few bits, and their sums over 32 columns, are then exact in 32 bits. Where a
column is infinite or no number, the scale is no number, and so are all products.

A rounded row of K columns takes 9 / 4 K bytes: K numbers int16, K / 32 scales and K / 32 sums of columns, in float32.
"""

from __future__ import annotations

from llvmlite import ir

from offload.native.code import FLOAT, FLOATS, I16, I32, I64, INTS, POINTER, SHORTS, Code, Value, function

COLUMNS = 32  # that share a scale
BIAS, MANTISSA_BITS, LARGEST_EXPONENT = 127, 23, 255
NO_NUMBER = 0x7FC0  # of bf16
BITS = 14  # of the largest number of 32, before its sign


def row_bytes(columns: int) -> int:
    """Return the bytes of a rounded row."""
    return columns * 9 // 4


def rounded_bytes(code: Code, columns: Value) -> Value:
    """Return the same in the text."""
    return code.lshr(code.mul(columns, code.number(row_bytes(4))), code.number(2))


def rounded_parts(
    code: Code, rounded: Value, columns: Value, num_rows: int
) -> tuple[list[Value], list[Value], list[Value]]:
    """Return where the numbers, the scales and the sums of each rounded row begin."""
    each = rounded_bytes(code, columns)
    rows = [code.at(rounded, code.mul(each, code.number(row))) for row in range(num_rows)]
    scales = [code.at(row, code.shl(columns, code.number(1))) for row in rows]
    return rows, scales, [code.at(scale, code.lshr(columns, code.number(3))) for scale in scales]


def add_rounding(module: ir.Module, *, of_bf16: bool = False) -> ir.Function:
    """Add `round_row(row, rounded, columns, first, last)` for rows of float32, or `round_bf16_row`, and return it.

    It rounds the groups of 32 columns from `first` up to `last`.
    """
    name = "round_bf16_row" if of_bf16 else "round_row"
    number_bytes = 2 if of_bf16 else 4
    arguments = {"row": POINTER, "rounded": POINTER, "columns": I64, "first": I64, "last": I64}
    given = function(module, name, arguments, is_inner=True)
    code = Code(given["function"])
    columns = given["columns"]
    _, (scales,), (sums,) = rounded_parts(code, given["rounded"], columns, 1)
    with code.loop(given["first"], given["last"]) as group:
        row = code.at(given["row"], code.mul(group, code.number(number_bytes * COLUMNS)))
        numbers = code.at(given["rounded"], code.mul(group, code.number(2 * COLUMNS)))
        places = [number_bytes * FLOATS.count * part for part in range(COLUMNS // FLOATS.count)]
        parts = [read_bf16(code, row, place) if of_bf16 else code.read(FLOATS, row, place) for place in places]
        scale, inverse, is_number = _power_of_two(code, parts)
        total = code.splat_of(0, INTS)
        for part, values in enumerate(parts):
            scaled = code.select(is_number, code.fmul(values, code.splat(inverse)), code.splat_of(0.0, FLOATS))
            whole = code.fptosi(code.intrinsic("llvm.roundeven.v8f32", FLOATS, scaled), INTS)
            total = code.add(total, whole)
            code.write(code.trunc(whole, ir.VectorType(SHORTS.element, FLOATS.count)), numbers, 2 * FLOATS.count * part)
        added = code.sitofp(code.intrinsic("llvm.vector.reduce.add.v8i32", I32, total), FLOAT)
        place = code.mul(group, code.number(4))
        code.write(scale, scales, place)
        code.write(code.fmul(added, scale), sums, place)
    code.ret_void()
    return given["function"]


def read_bf16(code: Code, pointer: Value, offset_bytes: Value | int = 0) -> Value:
    """Return eight numbers of bf16 as float32."""
    halves = code.read(ir.VectorType(I16, FLOATS.count), pointer, offset_bytes)
    return code.bitcast(code.shl(code.zext(halves, INTS), code.splat_of(16, INTS)), FLOATS)


def in_bf16(code: Code, values: Value) -> Value:
    """Return eight numbers of float32 rounded to bf16, of even bits where two are as near, as whole numbers."""
    bits = code.bitcast(values, INTS)
    last = code.and_(code.lshr(bits, code.splat_of(16, INTS)), code.splat_of(1, INTS))
    rounded = code.lshr(code.add(code.add(bits, code.splat_of(0x7FFF, INTS)), last), code.splat_of(16, INTS))
    is_number = code.fcmp_ordered("ord", values, values)
    whole = code.select(is_number, rounded, code.splat_of(NO_NUMBER, INTS))
    return code.trunc(whole, ir.VectorType(I16, FLOATS.count))


def _power_of_two(code: Code, parts: list[Value]) -> tuple[Value, Value, Value]:
    """Return what a unit of the numbers stands for, its inverse, powers of two, and whether all columns are finite."""
    bits = [code.and_(code.bitcast(part, INTS), code.splat_of(0x7FFFFFFF, INTS)) for part in parts]
    most = bits[0]
    for other in bits[1:]:
        most = code.intrinsic("llvm.umax.v8i32", INTS, most, other)
    largest = code.intrinsic("llvm.vector.reduce.umax.v8i32", I32, most)
    exponent = code.lshr(largest, ir.Constant(I32, MANTISSA_BITS))
    is_number = code.icmp_unsigned("<", exponent, ir.Constant(I32, LARGEST_EXPONENT))
    within = code.intrinsic("llvm.umax.i32", I32, exponent, ir.Constant(I32, BITS))
    within = code.intrinsic("llvm.umin.i32", I32, within, ir.Constant(I32, LARGEST_EXPONENT - 1))
    power = code.shl(code.sub(within, ir.Constant(I32, BITS - 1)), ir.Constant(I32, MANTISSA_BITS))
    inverse = code.shl(code.sub(ir.Constant(I32, 2 * BIAS + BITS - 1), within), ir.Constant(I32, MANTISSA_BITS))
    no_number = ir.Constant(FLOAT, float("nan"))
    return code.select(is_number, code.bitcast(power, FLOAT), no_number), code.bitcast(inverse, FLOAT), is_number
