"""Products with whole numbers of four bits, in an order of memory whose lanes need one instruction for each number.

A block has 32 rows of the weight, pair of columns after pair, 32 bytes each. A lane of 16 bits, of number l, has in
its p-th four bits row 8 p + l / 2 of the block and column l % 2 of the pair. A number stays where it stands in the
lane: its factor 16^p goes into the scale. `vpmaddwd` multiplies sixteen numbers by as many of a rounded row.
"""

from __future__ import annotations

from llvmlite import ir

from offload.native.code import FLOAT, FLOATS, I16, I32, I64, INTS, POINTER, SHORTS, Code, Value, function
from offload.native.products import UNIT_ROWS, add_driver
from offload.native.rounded_rows import COLUMNS, add_rounding

PLACES = 4  # numbers of four bits in a lane
MIDDLE = 8.0  # the number that a group's zero stands for
HIGH_HALF = -65536  # of 32 bits
NUMBERS, STEPS, NUM_COLUMNS, NUM_ROWS, GROUP = range(5)  # fields of a weight's record


def lanes_module(tiles: tuple[int, ...]) -> ir.Module:
    """Return the text of `round_rows` and `multiply`, which takes so many activation rows at once."""
    module = ir.Module("lanes")
    add_rounding(module)
    add_driver(module, {rows: _add_block(module, rows) for rows in tiles})
    return module


def _add_block(module: ir.Module, num_rows: int) -> ir.Function:
    """Add the product of a block of the weight with some rounded rows, whose sums go over columns in one order."""
    arguments = {"rounded": POINTER, "weight": POINTER, "out": POINTER, "unit": I64}
    given = function(module, f"block_{num_rows}", arguments, is_inner=True)
    code = Code(given["function"])
    weight, unit = given["weight"], given["unit"]
    columns, all_rows = code.field(weight, NUM_COLUMNS), code.field(weight, NUM_ROWS)
    numbers = code.at(
        code.field(weight, NUMBERS, POINTER), code.mul(unit, code.mul(columns, code.number(UNIT_ROWS // 2)))
    )
    steps = code.at(code.field(weight, STEPS, POINTER), code.mul(unit, code.number(4 * UNIT_ROWS)))
    row_bytes = code.add(code.shl(columns, code.number(1)), code.lshr(columns, code.number(2)))
    rows = [code.at(given["rounded"], code.mul(row_bytes, code.number(row))) for row in range(num_rows)]
    scales = [code.at(row, code.shl(columns, code.number(1))) for row in rows]
    sums = [code.at(scale, code.lshr(columns, code.number(3))) for scale in scales]
    found = [[code.variable(code.splat_of(0.0, FLOATS)) for _ in range(PLACES)] for _ in range(num_rows)]
    in_group = code.lshr(code.field(weight, GROUP), code.number(5))
    with code.loop(0, code.lshr(columns, code.number(5))) as part:
        whole = _whole_numbers(
            code,
            code.at(numbers, code.mul(part, code.number(COLUMNS * UNIT_ROWS // 2))),
            [code.at(row, code.mul(part, code.number(2 * COLUMNS))) for row in rows],
        )
        of_group = code.mul(code.mul(code.udiv(part, in_group), all_rows), code.number(4))
        place = code.mul(part, code.number(4))
        scale_of = [code.splat(code.read(FLOAT, scale, place, align=4)) for scale in scales]
        sum_of = [code.splat(code.read(FLOAT, one, place, align=4)) for one in sums]
        for lane in range(PLACES):
            step, zero = _steps(code, code.at(steps, of_group), lane)
            for row in range(num_rows):
                added = code.fused(
                    code.sitofp(whole[row][lane], FLOATS), code.fmul(step, scale_of[row]), found[row][lane].value
                )
                found[row][lane].value = code.fused(zero, sum_of[row], added)
    for row in range(num_rows):
        out = code.at(given["out"], code.mul(all_rows, code.number(4 * row)))
        for lane in range(PLACES):
            place = code.add(code.mul(unit, code.number(4 * UNIT_ROWS)), code.number(4 * FLOATS.count * lane))
            code.write(found[row][lane].value, out, place, align=4)
    code.ret_void()
    return given["function"]


def _whole_numbers(code: Code, numbers: Value, rows: list[Value]) -> list[list[Value]]:
    """Return the sums of products of 32 columns, for each row and place: whole numbers of 32 bits."""
    sums: list[list[Value]] = [[None] * PLACES for _ in rows]
    for pair in range(COLUMNS // 2):
        lanes = code.read(SHORTS, numbers, 2 * SHORTS.count * pair)
        of_rows = [code.bitcast(code.splat(code.read(I32, row, 4 * pair, align=4)), SHORTS) for row in rows]
        for place in range(PLACES):
            if place == PLACES - 1:
                own = code.lshr(lanes, code.splat_of(4 * place, SHORTS))
            else:
                own = code.and_(lanes, code.splat_of(15 << 4 * place, SHORTS))
            for row, of_row in enumerate(of_rows):
                product = code.intrinsic("llvm.x86.avx2.pmadd.wd", INTS, own, of_row)
                before = sums[row][place]
                sums[row][place] = product if before is None else code.add(before, product)
    return sums


def _steps(code: Code, steps: Value, place: int) -> tuple[Value, Value]:
    """Return what a place's numbers of eight rows are multiplied by, and what each column adds beside."""
    pairs = code.read(INTS, steps, 4 * INTS.count * place, align=4)  # of scale and zero, bf16 each
    step = code.bitcast(code.shl(pairs, code.splat_of(16, INTS)), FLOATS)
    zero = code.bitcast(code.and_(pairs, code.splat_of(HIGH_HALF, INTS)), FLOATS)
    zero = code.fused(step, code.splat_of(-MIDDLE, FLOATS), zero)
    is_shifted = place == PLACES - 1  # down to the lane's lowest bits
    return step if is_shifted else code.fmul(step, code.splat_of(16.0**-place, FLOATS)), zero


assert I16.width * SHORTS.count == I32.width * INTS.count
