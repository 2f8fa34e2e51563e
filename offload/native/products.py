"""What all products have in common: their arguments, the tiles of rows, and the threads that share a weight's rows.

`multiply(rounded, weight, out, num_rows, first, last)` multiplies rounded rows by the weight's units of 32 rows from
`first` up to `last`, and writes float32 [num_rows, rows of the weight]. `weight` points to a record of addresses and
sizes, which each kind of kernel describes; its third and fourth fields are the weight's columns and rows.
A row's sums do not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Mapping

from llvmlite import ir

from offload.native.code import I64, POINTER, Code, function
from offload.native.rounded_rows import row_bytes

UNIT_ROWS = 32
NUM_COLUMNS, NUM_ROWS = 2, 3  # fields of a weight's record


def add_driver(module: ir.Module, blocks: Mapping[int, ir.Function]) -> ir.Function:
    """Add `multiply`, which calls for each unit the functions of so many rows: the largest that are left."""
    arguments = {"rounded": POINTER, "weight": POINTER, "out": POINTER, "num_rows": I64, "first": I64, "last": I64}
    given = function(module, "multiply", arguments)
    code = Code(given["function"])
    columns, all_rows = code.field(given["weight"], NUM_COLUMNS), code.field(given["weight"], NUM_ROWS)
    rounded_bytes = code.lshr(code.mul(columns, code.number(row_bytes(4))), code.number(2))
    with code.loop(given["first"], given["last"]) as unit:
        done = code.variable(code.number(0))
        for size in sorted(blocks, reverse=True):
            times = code.udiv(code.sub(given["num_rows"], done.value), code.number(size))
            with code.loop(0, times):
                rows = code.at(given["rounded"], code.mul(done.value, rounded_bytes))
                out = code.at(given["out"], code.mul(code.mul(done.value, all_rows), code.number(4)))
                code.call(blocks[size], [rows, given["weight"], out, unit])
                done.value = code.add(done.value, code.number(size))
    code.ret_void()
    return given["function"]
