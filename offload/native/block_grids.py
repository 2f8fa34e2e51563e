"""GGML's types of one to three bits in LLVM's text: weights are looked up in a grid, eight or four at once.

Signs are bits apart. A number is the grid's times an odd factor of its 16 or 32 columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from llvmlite import ir

from offload.formats.gguf_grids import grid, shifted_grid
from offload.native.block_types import (
    BLOCK_TEXTS,
    GROUP,
    K_GROUPS,
    NUMBERS,
    BlockText,
    ColumnGroup,
    are_set,
    each_half,
    half_at,
)
from offload.native.code import FLOAT, HALF, I8, I16, I32, I64, Code, Value
from offload.native.instructions import BYTES

CPU = torch.device("cpu")
SHORT_PAIR = ir.VectorType(I16, 2)
Groups = Callable[[Code, Value], Iterator[ColumnGroup]]


def _looked_up(code: Code, name: str, places: Sequence[Value]) -> Value:
    """Return the numbers of a grid at some places, I32 each: 32 bytes."""
    word = I32 if name.startswith("IQ3") else I64
    module, words = code.module, (shifted_grid(CPU) if name == "IQ1" else grid(name, CPU)).tolist()
    if name not in module.globals:
        table = ir.GlobalVariable(module, ir.ArrayType(word, len(words)), name)
        table.linkage, table.global_constant = "internal", True
        table.initializer = ir.Constant(table.value_type, words)
    found = ir.Constant(ir.VectorType(word, len(places)), ir.Undefined)
    for lane, place in enumerate(places):
        offset = code.mul(code.zext(place, I64), code.number(word.width // 8))
        number = code.read(word, module.globals[name], offset)
        found = code.insert_element(found, number, ir.Constant(I32, lane))
    return code.bitcast(found, BYTES)


def _byte(code: Code, block: Value, place: int) -> Value:
    return code.zext(code.read(I8, block, place), I32)


def _bits(code: Code, word: Value, place: int, count: int) -> Value:
    """Return some bits of a word, from a place on."""
    return code.and_(code.lshr(word, ir.Constant(I32, place)), ir.Constant(I32, (1 << count) - 1))


def _even_signs(code: Code, word: Value) -> Value:
    """Return four times seven bits with an eighth, which makes their number even, as the word's four bytes."""
    spread = ir.Constant(I32, 0)
    for place in range(4):
        spread = code.or_(spread, code.shl(_bits(code, word, 7 * place, 7), ir.Constant(I32, 8 * place)))
    odd = spread
    for shift in (4, 2, 1):  # what comes from the byte above never reaches a lowest bit
        odd = code.xor(odd, code.and_(code.lshr(odd, ir.Constant(I32, shift)), ir.Constant(I32, 0x0F0F0F0F)))
    return code.or_(spread, code.shl(code.and_(odd, ir.Constant(I32, 0x01010101)), ir.Constant(I32, 7)))


def _signed(code: Code, numbers: Value, word: Value) -> Value:
    negative = code.sub(code.splat_of(0, BYTES), numbers)
    return code.sext(code.select(are_set(code, word), negative, numbers), NUMBERS)


def _odd(code: Code, scale: Value) -> Value:
    """Return twice a scale and one."""
    return code.or_(code.shl(scale, ir.Constant(I32, 1)), ir.Constant(I32, 1))


def _times_odd(code: Code, numbers: Value, scales: Sequence[Value]) -> Value:
    """Return numbers <32 x i16> times the odd factor of each 16 columns."""
    factors = ir.Constant(SHORT_PAIR, ir.Undefined)
    for lane, scale in enumerate(scales):
        factors = code.insert_element(factors, code.trunc(_odd(code, scale), I16), ir.Constant(I32, lane))
    return code.mul(numbers, each_half(code, factors, 0))


def _step(code: Code, block: Value, part: float, scale: Value | None = None) -> tuple[Value]:
    """Return the block's scale times a part, and an odd factor."""
    step = code.fmul(half_at(code, block, 0), ir.Constant(FLOAT, part))
    return (step if scale is None else code.fmul(step, code.uitofp(_odd(code, scale), FLOAT)),)


def _both_halves(code: Code, block: Value, place: int) -> list[Value]:
    packed = _byte(code, block, place)
    return [_bits(code, packed, shift, 4) for shift in (0, 4)]


def _iq2_xxs(code: Code, block: Value) -> Iterator[ColumnGroup]:
    for group in range(K_GROUPS):
        start, word = 2 + 8 * group, code.read(I32, block, 6 + 8 * group)
        numbers = _looked_up(code, "IQ2_XXS", [_byte(code, block, start + place) for place in range(4)])
        scale = _bits(code, word, 28, 4)
        yield ColumnGroup(_signed(code, numbers, _even_signs(code, word)), _step(code, block, 0.125, scale))


def _iq2_xs(code: Code, block: Value) -> Iterator[ColumnGroup]:
    for group in range(K_GROUPS):
        words = [code.zext(code.read(I16, block, 2 + 8 * group + 2 * place), I32) for place in range(4)]
        numbers = _looked_up(code, "IQ2_XS", [_bits(code, word, 0, 9) for word in words])
        sign = ir.Constant(I32, 0)
        for place, word in enumerate(words):
            sign = code.or_(sign, code.shl(_bits(code, word, 9, 7), ir.Constant(I32, 7 * place)))
        numbers = _signed(code, numbers, _even_signs(code, sign))
        scales = _both_halves(code, block, 66 + group)
        yield ColumnGroup(_times_odd(code, numbers, scales), _step(code, block, 0.125))


def _iq2_s(code: Code, block: Value) -> Iterator[ColumnGroup]:
    for group in range(K_GROUPS):
        high = _byte(code, block, 66 + group)
        places = [
            code.or_(
                _byte(code, block, 2 + 4 * group + place),
                code.shl(_bits(code, high, 2 * place, 2), ir.Constant(I32, 8)),
            )
            for place in range(4)
        ]
        numbers = _signed(code, _looked_up(code, "IQ2_S", places), code.read(I32, block, 34 + 4 * group))
        scales = _both_halves(code, block, 74 + group)
        yield ColumnGroup(_times_odd(code, numbers, scales), _step(code, block, 0.125))


def _iq3_xxs(code: Code, block: Value) -> Iterator[ColumnGroup]:
    for group in range(K_GROUPS):
        word = code.read(I32, block, 66 + 4 * group)
        numbers = _looked_up(code, "IQ3_XXS", [_byte(code, block, 2 + 8 * group + place) for place in range(8)])
        scale = _bits(code, word, 28, 4)
        yield ColumnGroup(_signed(code, numbers, _even_signs(code, word)), _step(code, block, 0.25, scale))


def _iq3_s(code: Code, block: Value) -> Iterator[ColumnGroup]:
    for group in range(K_GROUPS):
        high = _byte(code, block, 66 + group)
        places = [
            code.or_(
                _byte(code, block, 2 + 8 * group + place), code.shl(_bits(code, high, place, 1), ir.Constant(I32, 8))
            )
            for place in range(8)
        ]
        numbers = _signed(code, _looked_up(code, "IQ3_S", places), code.read(I32, block, 74 + 4 * group))
        scale = _both_halves(code, block, 106 + group // 2)[group % 2]
        yield ColumnGroup(numbers, _step(code, block, 1.0, scale))


def _iq1_s(code: Code, block: Value) -> Iterator[ColumnGroup]:
    for group in range(K_GROUPS):
        word = code.zext(code.read(I16, block, 34 + 2 * group), I32)
        is_less = code.shl(_bits(code, word, 15, 1), ir.Constant(I32, 11))
        places = [
            code.or_(
                code.or_(_byte(code, block, 2 + 4 * group + place), is_less),
                code.shl(_bits(code, word, 3 * place, 3), ir.Constant(I32, 8)),
            )
            for place in range(4)
        ]
        numbers = code.sext(_looked_up(code, "IQ1", places), NUMBERS)
        yield ColumnGroup(numbers, _step(code, block, 0.125, _bits(code, word, 12, 3)))


def _iq1_m(code: Code, block: Value) -> Iterator[ColumnGroup]:
    words = [code.zext(code.read(I16, block, 48 + 2 * place), I32) for place in range(4)]
    whole = ir.Constant(I32, 0)
    for place, word in enumerate(words):
        whole = code.or_(whole, code.shl(_bits(code, word, 12, 4), ir.Constant(I32, 4 * place)))
    scale = code.fpext(code.bitcast(code.trunc(whole, I16), HALF), FLOAT)
    step = (code.fmul(scale, ir.Constant(FLOAT, 0.125)),)
    for group in range(K_GROUPS):
        high = [half for place in range(2) for half in _both_halves(code, block, 32 + 2 * group + place)]
        places = [
            code.or_(_byte(code, block, 4 * group + place), code.shl(high[place], ir.Constant(I32, 8)))
            for place in range(4)
        ]
        numbers = code.sext(_looked_up(code, "IQ1", places), NUMBERS)
        first = 2 * group % 4
        scales = [_bits(code, words[group // 2], 3 * (first + half), 3) for half in range(2)]
        yield ColumnGroup(_times_odd(code, numbers, scales), step)


GRID_TEXTS = {
    name: BlockText(weights=K_GROUPS * GROUP, num_bytes=num_bytes, groups=groups)
    for name, num_bytes, groups in (
        ("IQ1_S", 50, _iq1_s), ("IQ1_M", 56, _iq1_m), ("IQ2_XXS", 66, _iq2_xxs), ("IQ2_XS", 74, _iq2_xs),
        ("IQ2_S", 82, _iq2_s), ("IQ3_XXS", 98, _iq3_xxs), ("IQ3_S", 110, _iq3_s),
    )
}  # fmt: skip
ALL_TEXTS = BLOCK_TEXTS | GRID_TEXTS
