"""Products with 32 rows of a weight that stand together, 32 columns after 32 columns, pair of columns after pair.

A lane is a row's: sums of products over the columns that share a scale are whole numbers, then float32 in one order.
Steps of such rows stand together too, so that memory is read in two streams. Each kind of numbers says how it makes
those sums of its bytes, and what their step is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from llvmlite import ir

from offload.native.code import FLOAT, HALF, I16, I32, I64, LANES, POINTER, VOID, Code, Value, function, variables
from offload.native.instructions import multiply_pairs
from offload.native.products import UNIT_ROWS
from offload.native.rounded_rows import COLUMNS, rounded_parts

NUMBERS, STEPS, NUM_COLUMNS, NUM_ROWS, GROUP = range(5)  # fields of a weight's record
AHEAD_BYTES, LINE_BYTES = 8192, 64  # of numbers that are fetched beforehand, and what memory brings at once
BF16_BITS = 16
Sums = list[list[Value]]  # of each rounded row and each register of the weight's rows


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBlock:
    """How numbers of 32 rows and 32 columns lie in memory."""

    num_bytes: int
    step_bytes: int  # of a row's step in a group of columns
    are_steps_apart: bool = False  # whether a group has the steps of all rows behind each other
    width: int  # floats of a register
    # The numbers' address, addresses of rounded rows -> sums for each share of the columns that has a step
    sums: Callable[[Code, Value, Sequence[Value]], list[Sums]]
    # A group's steps, a column, a first row -> steps of a register's rows, and what their columns have beside
    steps: Callable[[Code, Value, Value, int], tuple[Value, Value | None]]


def add_row_block(module: ir.Module, kind: RowBlock, num_rows: int) -> ir.Function:
    """Add the product of a block of the weight with some rounded rows, whose sums go over columns in one order."""
    arguments = {"rounded": POINTER, "weight": POINTER, "out": POINTER, "unit": I64}
    given = function(module, f"block_{num_rows}", arguments, is_inner=True)
    code, width = Code(given["function"]), kind.width
    floats, registers = ir.VectorType(FLOAT, width), UNIT_ROWS // width
    weight, unit, step_bytes = given["weight"], given["unit"], UNIT_ROWS * kind.step_bytes
    columns, all_rows = code.field(weight, NUM_COLUMNS), code.field(weight, NUM_ROWS)
    num_parts = code.lshr(columns, code.number(5))
    of_unit = code.mul(unit, code.mul(num_parts, code.number(kind.num_bytes)))
    numbers = code.at(code.field(weight, NUMBERS, POINTER), of_unit)
    rows, scales, sums = rounded_parts(code, given["rounded"], columns, num_rows)
    found = [[code.variable(code.splat_of(0.0, floats)) for _ in range(registers)] for _ in range(num_rows)]
    group, group_bytes, of_steps = code.field(weight, GROUP), code.number(step_bytes), code.number(step_bytes)
    # A group has 2^n columns: a division for each 32 of them takes as long as their products.
    group_bits = code.intrinsic("llvm.cttz.i64", I64, group, ir.Constant(ir.IntType(1), 0))
    if kind.are_steps_apart:
        group_bytes = code.mul(all_rows, code.number(kind.step_bytes))
    else:
        num_groups = code.lshr(code.sub(code.add(columns, group), code.number(1)), group_bits)
        of_steps = code.mul(num_groups, of_steps)
    steps = code.at(code.field(weight, STEPS, POINTER), code.mul(unit, of_steps))

    def steps_at(column: Value) -> Value:
        return code.at(steps, code.mul(code.lshr(column, group_bits), group_bytes))

    with code.loop(0, num_parts) as part:
        own = code.at(numbers, code.mul(part, code.number(kind.num_bytes)))
        of_rows = [code.at(row, code.mul(part, code.number(2 * COLUMNS))) for row in rows]
        column = code.mul(part, code.number(COLUMNS))
        _fetch(code, steps_at(code.add(column, code.number(AHEAD_BYTES // kind.num_bytes * COLUMNS))), step_bytes)
        _fetch(code, code.at(own, AHEAD_BYTES), kind.num_bytes)
        shares = kind.sums(code, own, of_rows)
        place = code.mul(part, code.number(4))
        scale_of, sum_of = (
            [code.splat(code.read(FLOAT, one, place, align=4), width) for one in facts] for facts in (scales, sums)
        )
        for share, whole in enumerate(shares):
            first = code.add(column, code.number(share * COLUMNS // len(shares)))
            of_share = steps_at(first)
            for register in range(registers):
                step, zero = kind.steps(code, of_share, first, register * width)
                for row in range(num_rows):
                    factor, total = code.fmul(step, scale_of[row]), found[row][register]
                    total.value = code.fused(code.sitofp(whole[row][register], floats), factor, total.value)
                    if zero is not None:
                        total.value = code.fused(zero, sum_of[row], total.value)
    for row in range(num_rows):
        out = code.at(given["out"], code.mul(all_rows, code.number(4 * row)))
        for register in range(registers):
            place = code.add(code.mul(unit, code.number(4 * UNIT_ROWS)), code.number(4 * width * register))
            code.write(found[row][register].value, out, place, align=4)
    code.ret_void()
    return given["function"]


def sums_over_pairs(
    code: Code, pairs: range, rows: Sequence[Value], width: int, numbers_of: Callable[[Value], Sequence[Value]]
) -> Sums:
    """Return sums over pairs of columns: of products of a rounded row with each register of numbers, 16 bits each."""
    zero = code.splat_of(0, ir.VectorType(I32, width))
    sums = [variables(code, [zero] * (UNIT_ROWS // width)) for _ in rows]
    for pair in _in_turn(code, pairs, width):
        numbers = numbers_of(pair)
        for row, totals in zip(rows, sums, strict=True):
            given = code.read(I32, code.at(row, code.shl(pair, code.number(2))), align=4)
            columns = code.bitcast(code.splat(given, width), numbers[0].type)
            for total, one in zip(totals, numbers, strict=True):
                total.value = code.add(total.value, multiply_pairs(code, one, columns))
    return [[total.value for total in totals] for totals in sums]


def _in_turn(code: Code, pairs: range, width: int) -> Iterator[Value]:
    """Yield numbers one by one; with registers of 256 bits, of which there are 16, once in a loop.

    Of many in a row LLVM would multiply some early, and have more sums than registers.
    """
    if width > LANES:
        yield from map(code.number, pairs)
        return
    with code.loop(pairs.start, pairs.stop) as pair:
        yield pair


def scales_at(code: Code, place: Value, first: int, width: int, *, in_half: bool) -> Value:
    """Return scales of rows, float16 or bf16 in memory, as float32."""
    floats, ints = ir.VectorType(FLOAT, width), ir.VectorType(I32, width)
    if in_half:
        return code.fpext(code.read(ir.VectorType(HALF, width), place, 2 * first), floats)
    bits = code.zext(code.read(ir.VectorType(I16, width), place, 2 * first), ints)
    return code.bitcast(code.shl(bits, code.splat_of(BF16_BITS, ints)), floats)


def _fetch(code: Code, place: Value, num_bytes: int) -> None:
    """Let memory start on bytes that are needed soon: they lie on the next page, or far from each other."""
    for start in range(0, num_bytes, LINE_BYTES):
        facts = [ir.Constant(I32, fact) for fact in (0, 3, 1)]  # to read, to keep, data
        code.intrinsic("llvm.prefetch.p0", VOID, code.at(place, start), *facts)
