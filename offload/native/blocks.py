"""Products with GGML's blocks as they lie in a file: row after row, wherever they begin, heads' halves in turn too.

A row's sums are of 16 lanes, in which the columns of each 32 stand as 2 l and 2 l + 1: the first 8 lanes and the others
are one register or two, and their bits are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from llvmlite import ir

from offload.native.block_grids import ALL_TEXTS
from offload.native.block_types import GROUP, BlockText, ColumnGroup
from offload.native.code import FLOAT, FLOATS, I16, I32, I64, LANES, POINTER, Code, Value, function, variables
from offload.native.instructions import WIDE, multiply_pairs
from offload.native.products import UNIT_ROWS, add_products
from offload.native.rounded_rows import rounded_parts

# Fields of a weight's record: their address, the weight's shape, and of how many rows halves stand in turn: 2 in order
BLOCKS, _, NUM_COLUMNS, NUM_ROWS, HEAD_ROWS = range(5)


def blocks_module(name: str, tiles: Sequence[int], *, width: int = LANES) -> ir.Module:
    """Return the text of products with blocks of a type, which take so many activation rows at once.

    Registers have so many floats: 8 or 16.
    """
    module = ir.Module(name)
    add_products(module, {rows: _add_unit(module, ALL_TEXTS[name], rows, width) for rows in tiles})
    return module


def _add_unit(module: ir.Module, kind: BlockText, num_rows: int, width: int) -> ir.Function:
    """Add the product of 32 rows of the weight with some rounded rows, whose sums go over columns in one order."""
    arguments = {"rounded": POINTER, "weight": POINTER, "out": POINTER, "unit": I64}
    given = function(module, f"unit_{num_rows}", arguments, is_inner=True)
    code, weight, floats = Code(given["function"]), given["weight"], ir.VectorType(FLOAT, width)
    columns, all_rows = code.field(weight, NUM_COLUMNS), code.field(weight, NUM_ROWS)
    rows, scales, sums = rounded_parts(code, given["rounded"], columns, num_rows)
    num_blocks = code.udiv(columns, code.number(kind.weights))
    first = code.mul(given["unit"], code.number(UNIT_ROWS))
    with code.loop(first, code.add(first, code.number(UNIT_ROWS))) as weight_row:
        stored_row = _stored_row(code, weight_row, code.field(weight, HEAD_ROWS))
        place = code.mul(code.mul(stored_row, num_blocks), code.number(kind.num_bytes))
        blocks = code.at(code.field(weight, BLOCKS, POINTER), place)
        zero = code.splat_of(0.0, floats)
        found = [variables(code, [zero] * (WIDE // width)) for _ in range(num_rows)]
        rest = variables(code, [ir.Constant(_minimum_kind(kind), None)] * num_rows)
        with code.loop(0, num_blocks) as number:
            block = code.at(blocks, code.mul(number, code.number(kind.num_bytes)))
            at_numbers = code.mul(number, code.number(2 * kind.weights))
            at_facts = code.mul(number, code.number(4 * kind.weights // GROUP))
            for group, one in _terms(kind.groups(code, block)):
                parts, steps = _parts(code, one.numbers, width), _steps(code, one.steps, width)
                for row in range(num_rows):
                    own = code.at(rows[row], code.add(at_numbers, code.number(2 * GROUP * group)))
                    scale = code.splat(code.read(FLOAT, code.at(scales[row], at_facts), 4 * group, align=4), width)
                    factors = [code.fmul(step, scale) for step in steps]
                    for part, (numbers, total) in enumerate(zip(parts, found[row], strict=True)):
                        whole = multiply_pairs(code, numbers, code.read(numbers.type, own, 4 * width * part, align=2))
                        factor = factors[part % len(factors)]
                        total.value = code.fused(code.sitofp(whole, floats), factor, total.value)
            if kind.minimum is not None:
                least = kind.minimum(code, block)
                for row, added in zip(sums, rest, strict=True):
                    added.value = code.fused(least, code.read(least.type, code.at(row, at_facts), align=4), added.value)
        for row in range(num_rows):
            total = _total(code, [part.value for part in found[row]])
            if kind.minimum is not None:
                added = rest[row].value
                total = code.fadd(total, code.sum_of(added) if added.type == FLOATS else added)
            out = code.at(given["out"], code.mul(code.mul(all_rows, code.number(row)), code.number(4)))
            code.write(total, out, code.mul(weight_row, code.number(4)), align=4)
    code.ret_void()
    return given["function"]


def _stored_row(code: Code, row: Value, head_rows: Value) -> Value:
    """Return where a row stands: of each head's, the first half's and the second half's in turn."""
    number, of_head = code.trunc(row, I32), code.trunc(head_rows, I32)
    half, within = code.lshr(of_head, ir.Constant(I32, 1)), code.urem(number, of_head)
    second = code.udiv(within, half)
    in_half = code.shl(code.sub(within, code.mul(second, half)), ir.Constant(I32, 1))
    return code.zext(code.add(code.add(code.sub(number, within), in_half), second), I64)


def _terms(groups: Iterator[ColumnGroup]) -> Iterator[tuple[int, ColumnGroup]]:
    """Yield groups with their places: what is added to one has the same."""
    for place, one in enumerate(groups):
        yield place, one
        if one.added is not None:
            yield place, one.added


def _steps(code: Code, steps: tuple[Value, ...], width: int) -> list[Value]:
    """Return what the numbers of each register are multiplied by: of one step, one for all."""
    if width == WIDE and len(steps) > 1:
        halves = ir.Constant(ir.VectorType(I32, WIDE), list(range(WIDE)))
        return [code.shuffle_vector(*(code.splat(step) for step in steps), halves)]
    return [code.splat(step, width) for step in steps]


def _minimum_kind(kind: BlockText) -> Value:
    return FLOAT if kind.weights == GROUP else FLOATS


def _parts(code: Code, numbers: Value, width: int) -> list[Value]:
    """Return numbers <32 x i16> in registers."""
    if width == WIDE:
        return [numbers]
    starts = range(0, GROUP, 2 * width)
    masks = [ir.Constant(ir.VectorType(I32, 2 * width), list(range(start, start + 2 * width))) for start in starts]
    return [code.shuffle_vector(numbers, numbers, mask) for mask in masks]


def _total(code: Code, parts: Sequence[Value]) -> Value:
    """Return the sum of 16 lanes, halves first."""
    return code.sum_of(parts[0] if len(parts) == 1 else code.fadd(*parts))


assert I16.width * 2 == I32.width
