"""GGML's blocks in LLVM's text: for each type, the whole numbers of groups of 32 columns, and what they stand for.

A number stands for number * step, and a column of the group for `minimum` more. Bytes are those of
`formats/gguf_blocks.py`, whose functions are the definition. Numbers have 13 bits at the most, so that their sums of
products with rounded rows are exact. `block_grids.py` has the types whose weights a grid lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from llvmlite import ir

from offload.formats.gguf_bits import FP4_NUMBERS
from offload.formats.gguf_blocks import IQ4_NUMBERS
from offload.native.code import FLOAT, FLOATS, HALF, I8, I16, I32, INTS, Code, Value
from offload.native.instructions import BYTES, HALF_BYTES, look_up

GROUP = 32  # columns
NUMBERS = ir.VectorType(I16, GROUP)
K_GROUPS = 8  # of a block of 256 weights


@dataclass(frozen=True, slots=True)
class ColumnGroup:
    """32 columns: their numbers, <32 x i16>, and floats that they are multiplied by: one, or one each 16 columns."""

    numbers: Value
    steps: tuple[Value, ...]
    added: ColumnGroup | None = None  # what the columns have beside


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockText:
    """A type of blocks: its groups in order, and what is added to a column of each, a float or <8 x float>."""

    weights: int
    num_bytes: int
    groups: Callable[[Code, Value], Iterator[ColumnGroup]]
    minimum: Callable[[Code, Value], Value] | None = None


def half_at(code: Code, block: Value, place: int) -> Value:
    """Return the float16 number at a byte of a block as float32."""
    return code.fpext(code.read(HALF, block, place), FLOAT)


def _bytes_of(code: Code, block: Value, place: int) -> Value:
    """Return 32 bytes."""
    return code.read(BYTES, block, place)


def _nibbles(code: Code, block: Value, place: int) -> Value:
    """Return the halves of 16 bytes: all low ones, and then all high ones."""
    packed = code.read(HALF_BYTES, block, place)
    low, high = code.and_(packed, code.splat_of(15, HALF_BYTES)), code.lshr(packed, code.splat_of(4, HALF_BYTES))
    return code.shuffle_vector(low, high, ir.Constant(ir.VectorType(I32, GROUP), list(range(GROUP))))


def are_set(code: Code, word: Value) -> Value:
    """Return whether the bits of 32 are set, for one of 32 bytes each."""
    four = code.bitcast(code.splat(word), BYTES)
    own = look_up(code, four, ir.Constant(BYTES, [column // 8 for column in range(GROUP)]))
    each = ir.Constant(BYTES, [1 << column % 8 for column in range(GROUP)])
    return code.icmp_unsigned("!=", code.and_(own, each), code.splat_of(0, BYTES))


def _fifth_bits(code: Code, block: Value, place: int) -> Value:
    """Return the bits of 32 as 0 or 16, for one of 32 bytes each."""
    is_set = are_set(code, code.read(I32, block, place))
    return code.select(is_set, code.splat_of(16, BYTES), code.splat_of(0, BYTES))


def _less(code: Code, numbers: Value, middle: int) -> Value:
    return code.sext(code.sub(numbers, code.splat_of(middle, BYTES)), NUMBERS)


def _looked_up(code: Code, numbers: Value, table: tuple[int, ...]) -> Value:
    """Return what numbers of four bits stand for."""
    halves = ir.Constant(BYTES, [*table, *table])
    return code.sext(look_up(code, halves, numbers), NUMBERS)


def each_half(code: Code, factors: Value, first: int) -> Value:
    """Return two factors that follow each other, <n x i16>, for 16 columns each: <32 x i16>."""
    mask = [first] * (GROUP // 2) + [first + 1] * (GROUP // 2)
    return code.shuffle_vector(factors, factors, ir.Constant(ir.VectorType(I32, GROUP), mask))


def _two_bits(code: Code, packed: Value, place: int) -> Value:
    return code.and_(code.lshr(packed, code.splat_of(2 * place, BYTES)), code.splat_of(3, BYTES))


def _lane(code: Code, vector: Value, lane: int) -> Value:
    return code.extract_element(vector, ir.Constant(I32, lane))


def _q8_0(code: Code, block: Value) -> Iterator[ColumnGroup]:
    yield ColumnGroup(code.sext(_bytes_of(code, block, 2), NUMBERS), (half_at(code, block, 0),))


def _q4_0(code: Code, block: Value) -> Iterator[ColumnGroup]:
    yield ColumnGroup(_less(code, _nibbles(code, block, 2), 8), (half_at(code, block, 0),))


def _q4_1(code: Code, block: Value) -> Iterator[ColumnGroup]:
    yield ColumnGroup(code.zext(_nibbles(code, block, 4), NUMBERS), (half_at(code, block, 0),))


def _q5_0(code: Code, block: Value) -> Iterator[ColumnGroup]:
    numbers = code.or_(_nibbles(code, block, 6), _fifth_bits(code, block, 2))
    yield ColumnGroup(_less(code, numbers, 16), (half_at(code, block, 0),))


def _q5_1(code: Code, block: Value) -> Iterator[ColumnGroup]:
    numbers = code.or_(_nibbles(code, block, 8), _fifth_bits(code, block, 4))
    yield ColumnGroup(code.zext(numbers, NUMBERS), (half_at(code, block, 0),))


def _second_half(code: Code, block: Value) -> Value:
    return half_at(code, block, 2)


def _iq4_nl(code: Code, block: Value) -> Iterator[ColumnGroup]:
    yield ColumnGroup(_looked_up(code, _nibbles(code, block, 2), IQ4_NUMBERS), (half_at(code, block, 0),))


def _mxfp4(code: Code, block: Value) -> Iterator[ColumnGroup]:
    exponent = code.zext(code.read(I8, block), I32)
    one, two = ir.Constant(I32, 1), ir.Constant(I32, 2)
    small = code.shl(ir.Constant(I32, 0x00200000), code.intrinsic("llvm.umin.i32", I32, exponent, one))
    large = code.shl(code.sub(exponent, one), ir.Constant(I32, 23))
    power = code.select(code.icmp_unsigned("<", exponent, two), small, large)
    yield ColumnGroup(_looked_up(code, _nibbles(code, block, 1), FP4_NUMBERS), (code.bitcast(power, FLOAT),))


def _six_bits(code: Code, block: Value, *, is_minimum: bool) -> Value:
    """Return the scales, or the minima, of a K block's groups: <8 x float>."""
    word = code.read(I32, block, 8 if is_minimum else 4)
    last = code.read(I32, block, 12)
    last = code.lshr(last, ir.Constant(I32, 4)) if is_minimum else last
    above = code.and_(code.lshr(word, ir.Constant(I32, 2)), ir.Constant(I32, 0x30303030))
    words = (
        code.and_(word, ir.Constant(I32, 0x3F3F3F3F)),
        code.or_(code.and_(last, ir.Constant(I32, 0x0F0F0F0F)), above),
    )
    both = ir.Constant(ir.VectorType(I32, 2), ir.Undefined)
    for place, found in enumerate(words):
        both = code.insert_element(both, found, ir.Constant(I32, place))
    factors = code.uitofp(code.zext(code.bitcast(both, ir.VectorType(I8, K_GROUPS)), INTS), FLOATS)
    return code.fmul(factors, code.splat(half_at(code, block, 2 if is_minimum else 0)))


def _q4_k(code: Code, block: Value) -> Iterator[ColumnGroup]:
    scale = _six_bits(code, block, is_minimum=False)
    for pair in range(K_GROUPS // 2):
        packed = _bytes_of(code, block, 16 + GROUP * pair)
        for half in range(2):
            number = code.lshr(packed, code.splat_of(4, BYTES)) if half else code.and_(packed, code.splat_of(15, BYTES))
            yield ColumnGroup(code.zext(number, NUMBERS), (_lane(code, scale, 2 * pair + half),))


def _q5_k(code: Code, block: Value) -> Iterator[ColumnGroup]:
    scale, fifth = _six_bits(code, block, is_minimum=False), _bytes_of(code, block, 16)
    for group in range(K_GROUPS):
        packed = _bytes_of(code, block, 48 + GROUP * (group // 2))
        low = code.lshr(packed, code.splat_of(4, BYTES)) if group % 2 else code.and_(packed, code.splat_of(15, BYTES))
        bit = code.and_(code.lshr(fifth, code.splat_of(group, BYTES)), code.splat_of(1, BYTES))
        number = code.or_(low, code.shl(bit, code.splat_of(4, BYTES)))
        yield ColumnGroup(code.zext(number, NUMBERS), (_lane(code, scale, group),))


def _k_minimum(code: Code, block: Value) -> Value:
    return code.fneg(_six_bits(code, block, is_minimum=True))


def _q6_k(code: Code, block: Value) -> Iterator[ColumnGroup]:
    """Each 16 columns have a factor, which their numbers are multiplied by."""
    scale, factors = half_at(code, block, 208), code.sext(code.read(HALF_BYTES, block, 192), ir.VectorType(I16, 16))
    for half in range(2):
        high = _bytes_of(code, block, 128 + GROUP * half)
        for quarter in range(4):
            packed = _bytes_of(code, block, 64 * half + GROUP * (quarter % 2))
            low = (
                code.and_(packed, code.splat_of(15, BYTES))
                if quarter < 2
                else code.lshr(packed, code.splat_of(4, BYTES))
            )
            bits = _two_bits(code, high, quarter)
            number = _less(code, code.or_(low, code.shl(bits, code.splat_of(4, BYTES))), 32)
            factor = each_half(code, factors, 8 * half + 2 * quarter)
            yield ColumnGroup(code.mul(number, factor), (scale,))


def _q3_k(code: Code, block: Value) -> Iterator[ColumnGroup]:
    """As Q6_K; the factors' high bits stand in four bytes, two each."""
    third, scale, words = _bytes_of(code, block, 0), half_at(code, block, 108), ir.VectorType(I32, 4)
    high = code.splat(code.read(I32, block, 104), 4)
    high = code.and_(code.lshr(high, ir.Constant(words, [0, 2, 4, 6])), code.splat_of(0x03030303, words))
    low, eight = code.read(ir.VectorType(I8, 8), block, 96), ir.VectorType(I8, 8)
    both = low, code.lshr(low, code.splat_of(4, eight))
    low = code.shuffle_vector(*both, ir.Constant(ir.VectorType(I32, 16), list(range(16))))
    low = code.and_(low, code.splat_of(15, HALF_BYTES))
    factors = code.or_(low, code.shl(code.bitcast(high, HALF_BYTES), code.splat_of(4, HALF_BYTES)))
    factors = code.sext(code.sub(factors, code.splat_of(32, HALF_BYTES)), ir.VectorType(I16, 16))
    for group in range(K_GROUPS):
        bits = _two_bits(code, _bytes_of(code, block, 32 + GROUP * (group // 4)), group % 4)
        more = code.and_(code.lshr(third, code.splat_of(group, BYTES)), code.splat_of(1, BYTES))
        number = _less(code, code.or_(bits, code.shl(more, code.splat_of(2, BYTES))), 4)
        yield ColumnGroup(code.mul(number, each_half(code, factors, 2 * group)), (scale,))


def _q2_k(code: Code, block: Value) -> Iterator[ColumnGroup]:
    """Each 16 columns have a factor and a minimum, which is a number of the columns too."""
    packed, shorts = code.read(HALF_BYTES, block, 0), ir.VectorType(I16, 16)
    factors = code.zext(code.and_(packed, code.splat_of(15, HALF_BYTES)), shorts)
    minima = code.zext(code.lshr(packed, code.splat_of(4, HALF_BYTES)), shorts)
    scale, least = half_at(code, block, 80), code.fneg(half_at(code, block, 82))
    for group in range(K_GROUPS):
        number = _two_bits(code, _bytes_of(code, block, 16 + GROUP * (group // 4)), group % 4)
        number = code.mul(code.zext(number, NUMBERS), each_half(code, factors, 2 * group))
        yield ColumnGroup(number, (scale,), ColumnGroup(each_half(code, minima, 2 * group), (least,)))


def _tq2_0(code: Code, block: Value) -> Iterator[ColumnGroup]:
    for group in range(K_GROUPS):
        number = _two_bits(code, _bytes_of(code, block, GROUP * (group // 4)), group % 4)
        yield ColumnGroup(_less(code, number, 1), (half_at(code, block, 64),))


def _tq1_0(code: Code, block: Value) -> Iterator[ColumnGroup]:
    """A byte has five numbers of three values; of the last four bytes four."""
    step, bytes_of = (half_at(code, block, 52),), _bytes_of(code, block, 0)
    for power in (1, 3, 9, 27, 81):
        yield ColumnGroup(_digits(code, bytes_of, [power] * GROUP), step)
    second, last = code.read(HALF_BYTES, block, 32), code.splat(code.read(I32, block, 48), 4)
    for other, powers in ((second, [1, 3]), (second, [9, 27]), (code.bitcast(last, HALF_BYTES), [81])):
        both = code.shuffle_vector(second, other, ir.Constant(ir.VectorType(I32, GROUP), list(range(GROUP))))
        lasting = [power for power in (1, 3, 9, 27) for _ in range(4)]
        each = [power for power in powers for _ in range(16)]
        yield ColumnGroup(_digits(code, both, (each + lasting)[:GROUP]), step)


def _digits(code: Code, packed: Value, powers: Sequence[int]) -> Value:
    """Return a number of three values of each of 32 bytes: the one that this power of three brings to the front."""
    moved = code.mul(code.zext(packed, NUMBERS), ir.Constant(NUMBERS, list(powers)))
    front = code.mul(code.and_(moved, code.splat_of(255, NUMBERS)), code.splat_of(3, NUMBERS))
    return code.sub(code.lshr(front, code.splat_of(8, NUMBERS)), code.splat_of(1, NUMBERS))


def _nvfp4(code: Code, block: Value) -> Iterator[ColumnGroup]:
    """Each 16 columns have a scale of E4M3 without a sign, and their numbers' low halves come first."""
    in_turn = [start + place for start in (0, 16, 8, 24) for place in range(8)]
    for group in range(2):
        numbers = _nibbles(code, block, 4 + 16 * group)
        numbers = code.shuffle_vector(numbers, numbers, ir.Constant(ir.VectorType(I32, GROUP), in_turn))
        steps = [_half_of_e4m3(code, code.read(I8, block, 2 * group + half)) for half in range(2)]
        yield ColumnGroup(_looked_up(code, numbers, FP4_NUMBERS), tuple(steps))


def _half_of_e4m3(code: Code, scale: Value) -> Value:
    bits = code.shl(code.and_(code.zext(scale, I32), ir.Constant(I32, 127)), ir.Constant(I32, 20))
    value = code.fmul(code.bitcast(bits, FLOAT), ir.Constant(FLOAT, 2.0**119))
    is_none = code.icmp_unsigned("==", scale, ir.Constant(I8, 127))
    return code.select(is_none, ir.Constant(FLOAT, 0.0), value)


def _iq4_xs(code: Code, block: Value) -> Iterator[ColumnGroup]:
    scale, high, low = half_at(code, block, 0), code.read(I16, block, 2), code.read(I32, block, 4)
    for group in range(K_GROUPS):
        upper = code.and_(code.lshr(code.zext(high, I32), ir.Constant(I32, 2 * group)), ir.Constant(I32, 3))
        lower = code.and_(code.lshr(low, ir.Constant(I32, 4 * group)), ir.Constant(I32, 15))
        factor = code.sub(code.or_(lower, code.shl(upper, ir.Constant(I32, 4))), ir.Constant(I32, 32))
        step = code.fmul(code.sitofp(factor, FLOAT), scale)
        yield ColumnGroup(_looked_up(code, _nibbles(code, block, 8 + 16 * group), IQ4_NUMBERS), (step,))


BLOCK_TEXTS = {
    "Q8_0": BlockText(weights=32, num_bytes=34, groups=_q8_0),
    "Q4_0": BlockText(weights=32, num_bytes=18, groups=_q4_0),
    "Q4_1": BlockText(weights=32, num_bytes=20, groups=_q4_1, minimum=_second_half),
    "Q5_0": BlockText(weights=32, num_bytes=22, groups=_q5_0),
    "Q5_1": BlockText(weights=32, num_bytes=24, groups=_q5_1, minimum=_second_half),
    "IQ4_NL": BlockText(weights=32, num_bytes=18, groups=_iq4_nl),
    "MXFP4": BlockText(weights=32, num_bytes=17, groups=_mxfp4),
    "Q4_K": BlockText(weights=256, num_bytes=144, groups=_q4_k, minimum=_k_minimum),
    "Q5_K": BlockText(weights=256, num_bytes=176, groups=_q5_k, minimum=_k_minimum),
    "Q6_K": BlockText(weights=256, num_bytes=210, groups=_q6_k),
    "Q3_K": BlockText(weights=256, num_bytes=110, groups=_q3_k),
    "Q2_K": BlockText(weights=256, num_bytes=84, groups=_q2_k),
    "TQ1_0": BlockText(weights=256, num_bytes=54, groups=_tq1_0),
    "TQ2_0": BlockText(weights=256, num_bytes=66, groups=_tq2_0),
    "NVFP4": BlockText(weights=64, num_bytes=36, groups=_nvfp4),
    "IQ4_XS": BlockText(weights=256, num_bytes=136, groups=_iq4_xs),
}
