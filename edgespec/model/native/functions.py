"""Functions of floats, eight at a time, in the text of a pass: their bits are the same on every processor."""

from __future__ import annotations

import math

from llvmlite import ir

from offload.native.code import DOUBLES, FLOAT, FLOATS, I32, INTS, LONGS, Code, Value
from offload.native.rounded_rows import in_bf16, read_bf16

LOG2_E, LN2_HIGH, LN2_LOW = 1.4426950408889634, 0.693359375, -2.12194440e-4
LEAST, MOST = -87.0, 88.0  # exponents whose powers are normal numbers
# Of exp(r) - 1 - r over r ** 2, for r within half of log(2): Cephes' expf
POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
LEAST_OF_DOUBLES = -700.0
LN2_OF_DOUBLES = (0.693147180369123816490, 1.90821492927058770002e-10)  # its first bits, and the rest: fdlibm's
POWERS_OF_DOUBLES = 13  # of the series: the next one's part is below half of the last bit
LOGARITHM_TERMS = 9  # of the odd series of log((1 + s) / (1 - s)), s up to a third
SUMS = 4  # of a product of rows: each adds every fourth register of columns
FIRST = ir.Constant(I32, 0)  # of a register
GELU_FACTORS = (1.5957691216057308, 0.07135481282553954)  # 2 sqrt(2 / pi), and that times 0.044715


def constant(value: float) -> Value:
    """Return eight times the same float."""
    return ir.Constant(FLOATS, [value] * FLOATS.count)


def exp(code: Code, value: Value) -> Value:
    """Return the powers of e; what is no number stays so."""
    value = code.select(code.fcmp_ordered("<", value, constant(LEAST)), constant(LEAST), value)
    value = code.select(code.fcmp_ordered(">", value, constant(MOST)), constant(MOST), value)
    is_number = code.fcmp_ordered("ord", value, value)
    whole = code.intrinsic("llvm.roundeven.v8f32", FLOATS, code.fmul(value, constant(LOG2_E)))
    rest = code.fused(whole, constant(-LN2_LOW), code.fused(whole, constant(-LN2_HIGH), value))
    power = constant(POLYNOMIAL[0])
    for factor in POLYNOMIAL[1:]:
        power = code.fused(power, rest, constant(factor))
    power = code.fadd(code.fused(power, code.fmul(rest, rest), rest), constant(1.0))
    exponent = code.fptosi(code.select(is_number, whole, constant(0.0)), INTS)
    bits = code.shl(code.add(exponent, code.splat_of(127, INTS)), code.splat_of(23, INTS))
    return code.fmul(power, code.bitcast(bits, FLOATS))


def exp_of_doubles(code: Code, value: Value) -> Value:
    """Return the powers of e of eight doubles up to 0."""
    least = of_doubles(LEAST_OF_DOUBLES)
    value = code.select(code.fcmp_ordered("<", value, least), least, value)
    is_number = code.fcmp_ordered("ord", value, value)
    whole = code.intrinsic("llvm.roundeven.v8f64", DOUBLES, code.fmul(value, of_doubles(LOG2_E)))
    rest = value
    for part in LN2_OF_DOUBLES:
        rest = code.fused(whole, of_doubles(-part), rest)
    power = of_doubles(1 / math.factorial(POWERS_OF_DOUBLES))
    for number in reversed(range(POWERS_OF_DOUBLES)):
        power = code.fused(power, rest, of_doubles(1 / math.factorial(number)))
    exponent = code.sext(code.fptosi(code.select(is_number, whole, of_doubles(0.0)), INTS), LONGS)
    bits = code.shl(code.add(exponent, code.splat_of(1023, LONGS)), code.splat_of(52, LONGS))
    return code.fmul(power, code.bitcast(bits, DOUBLES))


def of_doubles(value: float) -> Value:
    """Return eight times the same double."""
    return ir.Constant(DOUBLES, [value] * DOUBLES.count)


def softplus(code: Code, value: Value) -> Value:
    """Return log(1 + exp(value))."""
    zero = constant(0.0)
    positive = code.select(code.fcmp_ordered(">", value, zero), value, zero)
    power = exp(code, code.fsub(value, code.fmul(constant(2.0), positive)))  # of -|value|
    ratio = code.fdiv(power, code.fadd(constant(2.0), power))
    square, total = code.fmul(ratio, ratio), constant(1 / (2 * LOGARITHM_TERMS - 1))
    for term in reversed(range(LOGARITHM_TERMS - 1)):
        total = code.fused(total, square, constant(1 / (2 * term + 1)))
    return code.fused(code.fmul(constant(2.0), ratio), total, positive)


def _logistic_times(code: Code, value: Value, exponent: Value) -> Value:
    return code.fdiv(value, code.fadd(constant(1.0), exp(code, code.fneg(exponent))))


def logistic(code: Code, value: Value) -> Value:
    """Return 1 / (1 + exp(-value))."""
    return _logistic_times(code, constant(1.0), value)


def silu(code: Code, value: Value) -> Value:
    """Return value / (1 + exp(-value))."""
    return _logistic_times(code, value, value)


def gelu(code: Code, value: Value) -> Value:
    """Return the approximation of GELU by tanh."""
    first, third = (constant(factor) for factor in GELU_FACTORS)
    return _logistic_times(code, value, code.fmul(value, code.fused(code.fmul(value, value), third, first)))


ACTIVATIONS = {"silu": silu, "gelu": gelu}


def capped(code: Code, value: Value, cap: float) -> Value:
    """Return cap * tanh(value / cap)."""
    twice = exp(code, code.fmul(value, constant(2 / cap)))
    share = code.fdiv(constant(2.0), code.fadd(twice, constant(1.0)))
    return code.fmul(code.fsub(constant(1.0), share), constant(cap))


def read_floats(code: Code, pointer: Value, index: Value, *, is_bf16: bool) -> Value:
    """Return eight floats from the one with this number on."""
    if is_bf16:
        return read_bf16(code, pointer, code.shl(index, code.number(1)))
    return code.read(FLOATS, pointer, code.shl(index, code.number(2)))


def dot(code: Code, row: Value, weight: Value, number: Value, columns: int, *, is_bf16: bool) -> Value:
    """Return a row of floats times the row of this number in a weight, bf16 or float32: a float."""
    first = code.mul(number, code.number(columns))
    sums = [code.variable(constant(0.0)) for _ in range(SUMS)]
    with code.loop(0, columns, SUMS * FLOATS.count) as start:
        for part, total in enumerate(sums):
            column = code.add(start, code.number(part * FLOATS.count))
            left = read_floats(code, row, column, is_bf16=False)
            right = read_floats(code, weight, code.add(first, column), is_bf16=is_bf16)
            total.value = code.fused(left, right, total.value)
    one, two, three, four = (total.value for total in sums)
    return code.sum_of(code.fadd(code.fadd(one, two), code.fadd(three, four)))


def as_bf16(code: Code, value: Value) -> Value:
    """Return eight floats rounded to bf16, as floats."""
    return code.bitcast(code.shl(code.zext(in_bf16(code, value), INTS), code.splat_of(16, INTS)), FLOATS)


def write_floats(code: Code, value: Value, pointer: Value, index: Value, *, is_bf16: bool) -> None:
    """Write eight floats from the one with this number on: bf16 takes the nearest, of two the even one."""
    if is_bf16:
        code.write(in_bf16(code, value), pointer, code.shl(index, code.number(1)))
    else:
        code.write(value, pointer, code.shl(index, code.number(2)))


def length_inverse(code: Code, square_sum: Value, count: int, eps: float) -> Value:
    """Return one over the root of a mean of squares and eps: a float."""
    mean = code.fdiv(square_sum, ir.Constant(FLOAT, float(count)))
    root = code.intrinsic("llvm.sqrt.f32", FLOAT, code.fadd(mean, ir.Constant(FLOAT, eps)))
    return code.fdiv(ir.Constant(FLOAT, 1.0), root)
