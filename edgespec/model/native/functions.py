"""Functions of floats, eight at a time, in the text of a pass: their bits are the same on every processor."""

from __future__ import annotations

from llvmlite import ir

from offload.native.code import FLOAT, FLOATS, INTS, Code, Value
from offload.native.rounded_rows import in_bf16, read_bf16

LOG2_E, LN2_HIGH, LN2_LOW = 1.4426950408889634, 0.693359375, -2.12194440e-4
LEAST, MOST = -87.0, 88.0  # exponents whose powers are normal numbers
# Of exp(r) - 1 - r over r ** 2, for r within half of log(2): Cephes' expf
POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
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
