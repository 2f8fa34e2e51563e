"""Products with whole numbers of four bits, in an order of memory whose lanes need one instruction for each number.

A block has 32 rows of the weight, pair of columns after pair, 32 bytes each. A lane of 16 bits, of number l, has in
its p-th four bits row 8 p + l / 2 of the block and column l % 2 of the pair. A number stays where it stands in the
lane: its factor 16^p goes into the scale. `vpmaddwd` multiplies sixteen numbers by as many of a rounded row.
Registers of 512 bits take two pairs of columns at once, and sums of two places: whole numbers have no order.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from offload.native.code import FLOAT, FLOATS, I16, I32, I64, INTS, LANES, POINTER, SHORTS, VOID, Code, Value, function
from offload.native.products import UNIT_ROWS, add_products
from offload.native.rounded_rows import COLUMNS, rounded_parts

PLACES = 4  # numbers of four bits in a lane
FACTORS = (1.0, 1 / 16, 1 / 256, 1.0)  # of a number that stands there; the last is shifted down
MIDDLE = 8.0  # the number that a group's zero stands for
HIGH_HALF = -65536  # of 32 bits
NUMBERS, STEPS, NUM_COLUMNS, NUM_ROWS, GROUP = range(5)  # fields of a weight's record
AHEAD, LINE_BYTES = 8, 64  # groups of columns, and what memory brings at once
WIDE = 2 * LANES  # floats of a register of 512 bits
PAIRS = ir.VectorType(I64, LANES)  # of pairs of columns, in such a register
WIDE_INTS, WIDE_SHORTS = ir.VectorType(I32, WIDE), ir.VectorType(I16, 2 * WIDE)


def lanes_module(tiles: Sequence[int], *, width: int = LANES) -> ir.Module:
    """Return the text of products, which take so many activation rows at once, in registers of so many floats."""
    module = ir.Module("lanes")
    add_products(module, {rows: _add_block(module, rows, width) for rows in tiles})
    return module


def _add_block(module: ir.Module, num_rows: int, width: int) -> ir.Function:
    """Add the product of a block of the weight with some rounded rows, whose sums go over columns in one order."""
    arguments = {"rounded": POINTER, "weight": POINTER, "out": POINTER, "unit": I64}
    given = function(module, f"block_{num_rows}", arguments, is_inner=True)
    code, floats, registers = Code(given["function"]), ir.VectorType(FLOAT, width), UNIT_ROWS // width
    weight, unit = given["weight"], given["unit"]
    columns, all_rows = code.field(weight, NUM_COLUMNS), code.field(weight, NUM_ROWS)
    of_unit = code.mul(unit, code.mul(columns, code.number(UNIT_ROWS // 2)))
    numbers = code.at(code.field(weight, NUMBERS, POINTER), of_unit)
    steps = code.at(code.field(weight, STEPS, POINTER), code.mul(unit, code.number(4 * UNIT_ROWS)))
    rows, scales, sums = rounded_parts(code, given["rounded"], columns, num_rows)
    found = [[code.variable(code.splat_of(0.0, floats)) for _ in range(registers)] for _ in range(num_rows)]
    in_group = code.lshr(code.field(weight, GROUP), code.number(5))
    with code.loop(0, code.lshr(columns, code.number(5))) as part:
        own = code.at(numbers, code.mul(part, code.number(COLUMNS * UNIT_ROWS // 2)))
        of_rows = [code.at(row, code.mul(part, code.number(2 * COLUMNS))) for row in rows]
        ahead = code.udiv(code.add(part, code.number(AHEAD)), in_group)
        _fetch(code, code.at(steps, code.mul(code.mul(ahead, all_rows), code.number(4))), 4 * UNIT_ROWS)
        _fetch(code, code.at(own, AHEAD * COLUMNS * UNIT_ROWS // 2), COLUMNS * UNIT_ROWS // 2)
        whole = (_whole_numbers if width == LANES else _wide_whole_numbers)(code, own, of_rows)
        of_group = code.mul(code.mul(code.udiv(part, in_group), all_rows), code.number(4))
        place = code.mul(part, code.number(4))
        scale_of = [code.splat(code.read(FLOAT, scale, place, align=4), width) for scale in scales]
        sum_of = [code.splat(code.read(FLOAT, one, place, align=4), width) for one in sums]
        for register in range(registers):
            step, zero = _steps(code, code.at(steps, of_group), register * width, width)
            for row in range(num_rows):
                factor, before = code.fmul(step, scale_of[row]), found[row][register].value
                added = code.fused(code.sitofp(whole[row][register], floats), factor, before)
                found[row][register].value = code.fused(zero, sum_of[row], added)
    for row in range(num_rows):
        out = code.at(given["out"], code.mul(all_rows, code.number(4 * row)))
        for register in range(registers):
            place = code.add(code.mul(unit, code.number(4 * UNIT_ROWS)), code.number(4 * width * register))
            code.write(found[row][register].value, out, place, align=4)
    code.ret_void()
    return given["function"]


def _fetch(code: Code, place: Value, num_bytes: int) -> None:
    """Let memory start on bytes that are needed soon: steps lie far from each other, and numbers on the next page."""
    for start in range(0, num_bytes, LINE_BYTES):
        facts = [ir.Constant(I32, fact) for fact in (0, 3, 1)]  # to read, to keep, data
        code.intrinsic("llvm.prefetch.p0", VOID, code.at(place, start), *facts)


def _whole_numbers(code: Code, numbers: Value, rows: Sequence[Value]) -> list[list[Value]]:
    """Return the sums of products of 32 columns, for each row and place: whole numbers of 32 bits."""
    sums: list[list[Value]] = [[None] * PLACES for _ in rows]
    for pair in range(COLUMNS // 2):
        lanes = code.read(SHORTS, numbers, 2 * SHORTS.count * pair)
        of_rows = [code.bitcast(code.splat(code.read(I32, row, 4 * pair, align=4)), SHORTS) for row in rows]
        _add_to(code, "llvm.x86.avx2.pmadd.wd", lanes, of_rows, sums)
    return sums


def _wide_whole_numbers(code: Code, numbers: Value, rows: Sequence[Value]) -> list[list[Value]]:
    """Return the same, for each row and two places."""
    sums: list[list[Value]] = [[None] * PLACES for _ in rows]
    in_turn = [half * LANES + lane for lane in range(LANES) for half in range(2)]
    for pair in range(0, COLUMNS // 2, 2):
        both = code.read(WIDE_INTS, numbers, 2 * SHORTS.count * pair)  # a pair of columns, and then the next
        lanes = code.bitcast(code.shuffle_vector(both, both, ir.Constant(WIDE_INTS, in_turn)), WIDE_SHORTS)
        of_rows = [
            code.bitcast(code.splat(code.read(I64, row, 4 * pair, align=4), PAIRS.count), WIDE_SHORTS) for row in rows
        ]
        _add_to(code, "llvm.x86.avx512.pmaddw.d.512", lanes, of_rows, sums)
    firsts, seconds = (ir.Constant(WIDE_INTS, list(range(start, 2 * WIDE, 2))) for start in (0, 1))
    return [
        [
            code.add(*(code.shuffle_vector(of_row[place], of_row[place + 1], half) for half in (firsts, seconds)))
            for place in range(0, PLACES, 2)
        ]
        for of_row in sums
    ]


def _add_to(code: Code, name: str, lanes: Value, of_rows: Sequence[Value], sums: list[list[Value]]) -> None:
    """Add the products of the numbers of all places with each row's columns."""
    shorts = lanes.type
    ints = ir.VectorType(I32, shorts.count // 2)
    for place in range(PLACES):
        if place == PLACES - 1:
            own = code.lshr(lanes, code.splat_of(4 * place, shorts))
        else:
            own = code.and_(lanes, code.splat_of(15 << 4 * place, shorts))
        for of_row, found in zip(of_rows, sums, strict=True):
            product, before = code.intrinsic(name, ints, own, of_row), found[place]
            found[place] = product if before is None else code.add(before, product)


def _steps(code: Code, steps: Value, first: int, width: int) -> tuple[Value, Value]:
    """Return what the numbers of some rows are multiplied by, and what each column adds beside."""
    ints, floats = ir.VectorType(I32, width), ir.VectorType(FLOAT, width)
    pairs = code.read(ints, steps, 4 * first, align=4)  # of scale and zero, bf16 each
    step = code.bitcast(code.shl(pairs, code.splat_of(16, ints)), floats)
    zero = code.bitcast(code.and_(pairs, code.splat_of(HIGH_HALF, ints)), floats)
    zero = code.fused(step, code.splat_of(-MIDDLE, floats), zero)
    factors = [FACTORS[row // LANES] for row in range(first, first + width)]
    return code.fmul(step, ir.Constant(floats, factors)), zero


assert I16.width * SHORTS.count == I32.width * INTS.count
assert FLOATS.count == LANES
