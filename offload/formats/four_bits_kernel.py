"""Packed numbers unpacked by one kernel of Triton, which comes with torch on Linux: a card then moves each byte once.

The numbers are E2M1 (FP4), or whole ones of four or eight bits less a zero; scales belong to groups of columns.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from offload.formats.storage import Steps

logger = logging.getLogger("edgespec.offload")

ROWS_AT_ONCE, COLUMNS_AT_ONCE = 16, 128  # of one program: as fast as any on an H100


@functools.cache
def works_on(
    device: torch.device,
    dtype: torch.dtype,
    is_equal: Callable[[torch.device, torch.dtype], bool],
    of: str = "four bits",
) -> bool:
    """Return whether a kernel runs on a card, and does there what `is_equal` compares it with: in bf16 not on all."""
    if device.type != "cuda":
        return False
    try:
        if is_equal(device, dtype):
            return True
        logger.warning("a kernel for %s differs from torch's operations, which are used", of)
    except Exception as error:  # no Triton, no compiler, or a card or release that it does not know
        logger.info("a kernel for %s is not used: %s", of, error)
    return False


def unpack_fp4(packed: Tensor, scale: Tensor, out: Tensor) -> None:
    """Write packed [n, r, i / 2] times float32 scales [n, r, G], rounded once to the dtype of `out`."""
    _launch(packed.contiguous().view(torch.int32), None, scale, None, out, bits=4)


def unpack_words(steps: Steps, out: Tensor, *, bits: int) -> None:
    """Write steps whose numbers are int32 words, [n, r, i / each] or in AWQ's order [n, r / 8, i], to out [n, r, i]."""
    _launch(steps.numbers, steps.zeros, steps.scale, steps.groups, out, bits=bits)


def _launch(
    words: Tensor, zeros: Tensor | None, scale: Tensor, groups: Tensor | None, out: Tensor, *, bits: int
) -> None:
    num_matrices, rows, columns = out.shape
    scale, num_groups = scale.contiguous(), scale.shape[-1]
    run = _run_of_columns(columns // num_groups, is_in_order=groups is None)
    programs = (-(-num_matrices * rows // ROWS_AT_ONCE), -(-columns // COLUMNS_AT_ONCE))
    with torch.cuda.device(out.device) if out.is_cuda else torch.no_grad():
        _kernel()[programs](
            words, scale if zeros is None else zeros.contiguous(), scale, scale if groups is None else groups, out,
            num_matrices * rows, rows, columns, num_groups, columns // num_groups, *words.stride(),
            bits=bits, is_fp4=zeros is None, is_in_rows=words.shape[1] != rows, is_in_order=groups is None,
            each=32 // bits, run=run, runs=COLUMNS_AT_ONCE // run,
            rows_at_once=ROWS_AT_ONCE, columns_at_once=COLUMNS_AT_ONCE,
        )  # fmt: skip


def _run_of_columns(group_columns: int, *, is_in_order: bool) -> int:
    """Return how many columns beside each other are of one group wherever they begin at a multiple of that."""
    return math.gcd(group_columns, COLUMNS_AT_ONCE) if is_in_order else 1


@functools.cache
def _kernel() -> Any:
    """Return the kernel, which is compiled for a card when it is first called.

    A program reads each word once, and a scale and a zero once for a run of columns.
    """
    triton, tl = import_module("triton"), import_module("triton.language")

    def unpack(  # type: ignore
        words, zeros, scale, groups, out, all_rows, rows, columns, num_groups, group_columns,
        matrix_words, row_words, column_words,
        bits: tl.constexpr, is_fp4: tl.constexpr, is_in_rows: tl.constexpr, is_in_order: tl.constexpr,  # type: ignore
        each: tl.constexpr, run: tl.constexpr, runs: tl.constexpr,  # type: ignore
        rows_at_once: tl.constexpr, columns_at_once: tl.constexpr,  # type: ignore
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64) * rows_at_once + tl.arange(0, rows_at_once)  # of all matrices
        column = tl.program_id(1) * columns_at_once + tl.arange(0, columns_at_once)
        is_there = (row < all_rows)[:, None] & (column < columns)[None, :]

        if is_in_rows:  # a word has rows 0 2 4 6 1 3 5 7 of a column
            first = tl.program_id(0).to(tl.int64) * rows_at_once + tl.arange(0, rows_at_once // each) * each
            place = (first // rows * matrix_words + first % rows // each * row_words)[:, None]
            has_word = (first < all_rows)[:, None] & (column < columns)[None, :]
            word = tl.load(words + place + (column * column_words)[None, :], mask=has_word, other=0)
            turn = tl.arange(0, each) % 2 * 4 + tl.arange(0, each) // 2
            code = word[:, None, :] >> (turn * bits)[None, :, None]
        else:
            first = tl.program_id(1) * columns_at_once + tl.arange(0, columns_at_once // each) * each
            place = (row // rows * matrix_words + row % rows * row_words)[:, None]
            has_word = (row < all_rows)[:, None] & (first < columns)[None, :]
            word = tl.load(words + place + (first // each * column_words)[None, :], mask=has_word, other=0)
            code = word[:, :, None] >> (tl.arange(0, each) * bits)[None, None, :]
        code = tl.reshape(code & ((1 << bits) - 1), (rows_at_once, columns_at_once))

        begin = tl.program_id(1) * columns_at_once + tl.arange(0, runs) * run
        has_run = (row < all_rows)[:, None] & (begin < columns)[None, :]
        if is_in_order:
            group = (row * num_groups)[:, None] + (begin // group_columns)[None, :]
        else:
            turned = groups + (row // rows * columns)[:, None] + begin[None, :]
            group = (row * num_groups)[:, None] + tl.load(turned, mask=has_run, other=0)
        step = tl.load(scale + group, mask=has_run, other=0.0).to(tl.float32)
        code = tl.reshape(code, (rows_at_once, runs, run))
        if is_fp4:  # E2M1: from 1 on the same bits as float32, with another bias; below there are 0 and a half
            normal = ((((code >> 1) & 3) + 126 << 23) | ((code & 1) << 22)).to(tl.float32, bitcast=True)
            size = tl.where((code & 7) < 2, (code & 1).to(tl.float32) * 0.5, normal)
            sign = (code >> 3) << 31  # as a bit: Triton negates by 0 - x, which takes -0 from zeros
            number = (size.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
        else:
            zero = tl.load(zeros + group, mask=has_run, other=0).to(tl.int32)
            number = (code - zero[:, :, None]).to(tl.float32)
        product = tl.reshape(number * step[:, :, None], (rows_at_once, columns_at_once))
        tl.store(out + (row * columns)[:, None] + column[None, :], product.to(out.dtype.element_ty), mask=is_there)

    return triton.jit(unpack)
