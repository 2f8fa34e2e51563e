"""What all products have in common: their arguments, the tiles of rows, and the threads that share a weight's rows.

`multiply(rounded, weight, out, num_rows, first, last)` multiplies rounded rows by the weight's units of 32 rows from
`first` up to `last`, and writes float32 [num_rows, rows of the weight]. `weight` points to a record of addresses and
sizes, which each kind of kernel describes; its third and fourth fields are the weight's columns and rows.
A row's sums do not depend on the other rows.

`work_on_float32(work)` and `work_on_bf16(work)` do all of a product, on as many threads as call them with one record
of addresses and sizes: rows are rounded, and once all are, each thread multiplies by some of the units.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from llvmlite import ir

from offload.native.code import FLOATS, I32, I64, POINTER, VOID, Code, Value, function
from offload.native.rounded_rows import COLUMNS, add_rounding, in_bf16, rounded_bytes

UNIT_ROWS = 32
NUM_COLUMNS, NUM_ROWS = 2, 3  # fields of a weight's record
# Fields of a work's record: `SUMS` are float32, `OUT` is for bf16; the last three are functions of OpenMP
ROWS, ROUNDED, WEIGHT, SUMS, OUT, WORK_ROWS, UNITS, THREAD, THREADS, BARRIER = range(10)


def add_driver(
    module: ir.Module,
    blocks: Mapping[int, ir.Function],
    *,
    bytes_of_row: Callable[[Code, Value], Value] = rounded_bytes,
) -> ir.Function:
    """Add `multiply`, which calls for each unit the functions of so many rows: the largest that are left.

    `bytes_of_row` is what a row of so many columns takes: by default a rounded one.
    """
    arguments = {"rounded": POINTER, "weight": POINTER, "out": POINTER, "num_rows": I64, "first": I64, "last": I64}
    given = function(module, "multiply", arguments)
    code = Code(given["function"])
    columns, all_rows = code.field(given["weight"], NUM_COLUMNS), code.field(given["weight"], NUM_ROWS)
    each = bytes_of_row(code, columns)
    with code.loop(given["first"], given["last"]) as unit:
        done = code.variable(code.number(0))
        for size in sorted(blocks, reverse=True):
            times = code.udiv(code.sub(given["num_rows"], done.value), code.number(size))
            with code.loop(0, times):
                rows = code.at(given["rounded"], code.mul(done.value, each))
                out = code.at(given["out"], code.mul(code.mul(done.value, all_rows), code.number(4)))
                code.call(blocks[size], [rows, given["weight"], out, unit])
                done.value = code.add(done.value, code.number(size))
    code.ret_void()
    return given["function"]


def add_products(module: ir.Module, blocks: Mapping[int, ir.Function]) -> None:
    """Add `multiply`, and both functions that do all of a product."""
    multiply = add_driver(module, blocks)
    for of_bf16 in (False, True):
        add_work(module, add_rounding(module, of_bf16=of_bf16), multiply, of_bf16=of_bf16)


def add_work(module: ir.Module, round_row: ir.Function | None, multiply: ir.Function, *, of_bf16: bool = False) -> None:
    """Add what does all of a product for rows of float32, or of bf16: without a function that rounds, as they are."""
    given = function(module, "work_on_bf16" if of_bf16 else "work_on_float32", {"work": POINTER})
    code, work = Code(given["function"]), given["work"]
    rows, rounded, weight, sums, out = (
        code.field(work, place, POINTER) for place in (ROWS, ROUNDED, WEIGHT, SUMS, OUT)
    )
    num_rows, columns, all_rows = (
        code.field(work, WORK_ROWS),
        code.field(weight, NUM_COLUMNS),
        code.field(weight, NUM_ROWS),
    )
    asked = (_call(code, code.field(work, place, POINTER), I32) for place in (THREAD, THREADS))
    thread, threads = (code.zext(fact, I64) for fact in asked)
    own_bytes = code.mul(columns, code.number(2 if of_bf16 else 4))
    groups = share_of(code, code.udiv(columns, code.number(COLUMNS)), thread, threads)
    if round_row is None:
        rounded = rows
    else:
        with code.loop(0, num_rows) as row:
            to = code.at(rounded, code.mul(row, rounded_bytes(code, columns)))
            code.call(round_row, [code.at(rows, code.mul(row, own_bytes)), to, columns, *groups])
        _call(code, code.field(work, BARRIER, POINTER), VOID)
    first, last = share_of(code, code.field(work, UNITS), thread, threads)
    code.call(multiply, [rounded, weight, sums, num_rows, first, last])
    if of_bf16:
        start, end = (code.mul(unit, code.number(UNIT_ROWS)) for unit in (first, last))
        with code.loop(0, num_rows) as row, code.loop(start, end, FLOATS.count) as column:
            number = code.add(code.mul(row, all_rows), column)
            values = code.read(FLOATS, sums, code.mul(number, code.number(4)), align=4)
            code.write(in_bf16(code, values), out, code.mul(number, code.number(2)))
    code.ret_void()


def share_of(code: Code, count: Value, thread: Value, threads: Value) -> tuple[Value, Value]:
    """Return the first of a thread's share of so many, and the next thread's first."""
    first, last = (code.udiv(code.mul(count, end), threads) for end in (thread, code.add(thread, code.number(1))))
    return first, last


def _call(code: Code, address: Value, result: Any) -> Value:
    """Call a function without arguments."""
    return code.call_at(address, ir.FunctionType(result, ()), [])
