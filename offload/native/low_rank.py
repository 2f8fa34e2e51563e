"""Products of rows with two small matrices, of which one makes few numbers of a row and the other many of these.

`add(work)` adds to rows [n, o] of float32 what rows [n, i] give: (x A) B, and a bias if there is one, times a scale.
`work` is a record of the fields below. A is [r, i], row after row, and B [o / 16, r, 16], so that it is read from its
first number to its last. Threads share the rows. A row's sums do not depend on the other rows.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from llvmlite import ir
from torch import Tensor

from offload.native import threads
from offload.native.code import FLOAT, I32, I64, POINTER, Code, Value, function
from offload.native.compiler import Compiled, compiled, has_wide_registers
from offload.native.products import share_of

LANES = 16  # one register, or two: the sums are the same
FLOATS = ir.VectorType(FLOAT, LANES)
FLOAT_BYTES = 4
ROWS, FEW, OUT, DOWN, UP, BIAS, NUM_ROWS, COLUMNS, RANK, ALL_ROWS, SCALE, THREAD, THREADS = range(13)
ROWS_A_THREAD = 4  # at least: fewer are no work for another


def low_rank_module(tiles: Sequence[int], together: int) -> ir.Module:
    """Return the text of `add`, which takes so many rows at once, by so many rows of A `together`."""
    module = ir.Module("low_rank")
    blocks = {rows: _add_block(module, rows, together) for rows in tiles}
    given = function(module, "add", {"work": POINTER})
    code, work = Code(given["function"]), given["work"]
    asked = (
        code.call_at(code.field(work, place, POINTER), ir.FunctionType(I32, ()), []) for place in (THREAD, THREADS)
    )
    thread, num_threads = (code.zext(fact, I64) for fact in asked)
    first, last = share_of(code, code.field(work, NUM_ROWS), thread, num_threads)
    done = code.variable(first)
    for size in sorted(blocks, reverse=True):
        times = code.udiv(code.sub(last, done.value), code.number(size))
        with code.loop(0, times):
            code.call(blocks[size], [work, done.value])
            done.value = code.add(done.value, code.number(size))
    code.ret_void()
    return module


def _add_block(module: ir.Module, num_rows: int, together: int) -> ir.Function:
    """Add the products of so many rows from the one with a number on."""
    given = function(module, f"block_{num_rows}", {"work": POINTER, "first": I64}, is_inner=True)
    code, work = Code(given["function"]), given["work"]
    rank, columns, all_rows = (code.field(work, place) for place in (RANK, COLUMNS, ALL_ROWS))
    numbers = [code.add(given["first"], code.number(row)) for row in range(num_rows)]
    rows, few, out = (
        [_row(code, code.field(work, place, POINTER), number, width) for number in numbers]
        for place, width in ((ROWS, columns), (FEW, rank), (OUT, all_rows))
    )
    down = code.field(work, DOWN, POINTER)
    done = code.variable(code.number(0))
    for size in (together, 1):
        times = code.udiv(code.sub(rank, done.value), code.number(size))
        with code.loop(0, times):
            first = done.value
            own = [_row(code, down, code.add(first, code.number(other)), columns) for other in range(size)]
            sums = [[code.variable(code.splat_of(0.0, FLOATS)) for _ in own] for _ in rows]
            with code.loop(0, columns, LANES) as column:
                of_weight, of_rows = ([_floats(code, one, column) for one in some] for some in (own, rows))
                for row, of_row in zip(of_rows, sums, strict=True):
                    for weight, total in zip(of_weight, of_row, strict=True):
                        total.value = code.fused(weight, row, total.value)
            for to, of_row in zip(few, sums, strict=True):
                for other, total in enumerate(of_row):
                    place = code.shl(code.add(first, code.number(other)), code.number(2))
                    code.write(code.sum_of(total.value), to, place, align=4)
            done.value = code.add(done.value, code.number(size))
    bias, scale = code.field(work, BIAS, POINTER), code.splat(code.field(work, SCALE, FLOAT), LANES)
    up = code.field(work, UP, POINTER)
    with code.loop(0, all_rows, LANES) as number:
        totals = [code.variable(code.splat_of(0.0, FLOATS)) for _ in rows]
        block = _row(code, up, number, rank)
        with code.loop(0, rank) as place:
            weight = _floats(code, block, code.mul(place, code.number(LANES)))
            for of_row, total in zip(few, totals, strict=True):
                one = code.read(FLOAT, of_row, code.shl(place, code.number(2)), align=4)
                total.value = code.fused(code.splat(one, LANES), weight, total.value)
        more = _floats(code, bias, number)
        for to, total in zip(out, totals, strict=True):
            added = code.fmul(code.fadd(total.value, more), scale)
            code.write(code.fadd(_floats(code, to, number), added), to, code.shl(number, code.number(2)))
    code.ret_void()
    return given["function"]


def _row(code: Code, matrix: Value, number: Value, columns: Value) -> Value:
    """Return where a row of a matrix begins."""
    return code.at(matrix, code.mul(code.mul(number, columns), code.number(FLOAT_BYTES)))


def _floats(code: Code, row: Value, column: Value) -> Value:
    return code.read(FLOATS, row, code.shl(column, code.number(2)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LowRankWeight:
    """Two matrices and a bias, as the compiled text takes them."""

    down: Tensor  # [r, i]
    up: Tensor  # [o / 16, r, 16]
    bias: Tensor  # [o]: zeros where there is none

    @classmethod
    def of(cls, down: Tensor, up: Tensor, bias: Tensor | None) -> LowRankWeight | None:
        """Return matrices [r, i] and [o, r] of float32 and a bias; None where their sizes are not whole registers."""
        (rank, columns), rows = down.shape, up.shape[0]
        if down.device.type != "cpu" or columns % LANES or rows % LANES:
            return None
        return cls(
            down=down.contiguous(),
            up=up.view(-1, LANES, rank).transpose(1, 2).contiguous(),
            bias=_no_bias(rows) if bias is None else bias.contiguous(),
        )

    def add(self, rows: Tensor, out: Tensor, scale: float) -> None:
        """Add to float32 rows [n, o] the products of rows [n, i] times the scale; all lie row after row."""
        num_rows, rank = len(rows), len(self.down)
        few = torch.empty(num_rows * rank)
        num_threads = max(1, min(threads.most_threads(), num_rows // ROWS_A_THREAD))
        work = (ctypes.c_int64 * 13)(
            rows.data_ptr(), few.data_ptr(), out.data_ptr(), self.down.data_ptr(), self.up.data_ptr(),
            self.bias.data_ptr(), num_rows, rows.shape[1], rank, out.shape[1],
            int.from_bytes(struct.pack("<f", scale), "little"), *_openmp(),
        )  # fmt: skip
        threads.run(_compiled().address("add"), ctypes.addressof(work), num_threads)


@functools.cache
def _no_bias(rows: int) -> Tensor:
    """Return zeros, of which all weights of so many rows have the same."""
    return torch.zeros(rows)


@functools.cache
def _openmp() -> list[int]:
    return [threads.address_of(name) or 0 for name in ("omp_get_thread_num", "omp_get_num_threads")]


@functools.cache
def _compiled() -> Compiled:
    is_wide = has_wide_registers()
    return compiled(str(low_rank_module((4, 2, 1) if is_wide else (2, 1), 4 if is_wide else 2)))
