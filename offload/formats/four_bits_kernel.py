"""Packed numbers unpacked by one kernel of Triton, which comes with torch on Linux: a card then moves each byte once.

The numbers are E2M1 (FP4), or whole ones of four or eight bits less a zero; scales belong to groups of columns.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from offload.formats.packed_format import Steps

logger = logging.getLogger("edgespec.offload")

ROWS_AT_ONCE, COLUMNS_AT_ONCE = 32, 64  # of one program


@functools.cache
def works_on(device: torch.device, dtype: torch.dtype, is_equal: Callable[[torch.device, torch.dtype], bool]) -> bool:
    """Return whether a kernel runs on a card, and does there what `is_equal` compares it with: in bf16 not on all."""
    if device.type != "cuda":
        return False
    try:
        if is_equal(device, dtype):
            return True
        logger.warning("a kernel for four bits differs from torch's operations, which are used")
    except Exception as error:  # no Triton, no compiler, or a card or release that it does not know
        logger.info("a kernel for four bits is not used: %s", error)
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
    programs = (-(-num_matrices * rows // ROWS_AT_ONCE), -(-columns // COLUMNS_AT_ONCE))
    with torch.cuda.device(out.device) if out.is_cuda else torch.no_grad():
        _kernel()[programs](
            words, scale if zeros is None else zeros.contiguous(), scale, scale if groups is None else groups, out,
            num_matrices * rows, rows, columns, num_groups, columns // num_groups, *words.stride(),
            bits=bits, is_fp4=zeros is None, is_in_rows=words.shape[1] != rows, is_in_order=groups is None,
            rows_at_once=ROWS_AT_ONCE, columns_at_once=COLUMNS_AT_ONCE,
        )  # fmt: skip


@functools.cache
def _kernel() -> Any:
    """Return the kernel, which is compiled for a card when it is first called."""
    triton, tl = import_module("triton"), import_module("triton.language")

    def unpack(  # type: ignore
        words, zeros, scale, groups, out, all_rows, rows, columns, num_groups, group_columns,
        matrix_words, row_words, column_words,
        bits: tl.constexpr, is_fp4: tl.constexpr, is_in_rows: tl.constexpr, is_in_order: tl.constexpr,  # type: ignore
        rows_at_once: tl.constexpr, columns_at_once: tl.constexpr,  # type: ignore
    ):  # fmt: skip
        every_row = tl.program_id(0).to(tl.int64) * rows_at_once + tl.arange(0, rows_at_once)[:, None]
        column = tl.program_id(1) * columns_at_once + tl.arange(0, columns_at_once)[None, :]
        is_there = (every_row < all_rows) & (column < columns)
        matrix, row = every_row // rows, every_row % rows
        if is_in_rows:  # rows 0 2 4 6 1 3 5 7
            turn = (row % 2 * 4 + row % 8 // 2).to(tl.int32)
            place = matrix * matrix_words + row // 8 * row_words + column * column_words
        else:
            turn = column % (32 // bits)
            place = matrix * matrix_words + row * row_words + column // (32 // bits) * column_words
        code = (tl.load(words + place, mask=is_there, other=0) >> turn * bits) & ((1 << bits) - 1)
        if is_in_order:
            group = every_row * num_groups + column // group_columns
        else:
            group = every_row * num_groups + tl.load(groups + matrix * columns + column, mask=is_there, other=0)
        if is_fp4:  # E2M1: from 1 on the same bits as float32, with another bias; below there are 0 and a half
            normal = ((((code >> 1) & 3) + 126 << 23) | ((code & 1) << 22)).to(tl.float32, bitcast=True)
            size = tl.where((code & 7) < 2, (code & 1).to(tl.float32) * 0.5, normal)
            sign = (code >> 3) << 31  # as a bit: Triton negates by 0 - x, which takes -0 from zeros
            number = (size.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
        else:
            number = (code - tl.load(zeros + group, mask=is_there, other=0).to(tl.int32)).to(tl.float32)
        product = number * tl.load(scale + group, mask=is_there, other=0.0).to(tl.float32)
        tl.store(out + every_row * columns + column, product.to(out.dtype.element_ty), mask=is_there)

    return triton.jit(unpack)
