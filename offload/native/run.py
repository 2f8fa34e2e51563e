"""Products of tensors by compiled text, on torch's own threads."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from offload.native import threads
from offload.native.compiler import Compiled
from offload.native.products import NUM_COLUMNS, NUM_ROWS, UNIT_ROWS
from offload.native.rounded_rows import row_bytes

WORKS = {torch.float32: "work_on_float32", torch.bfloat16: "work_on_bf16"}


def product(code: Compiled, weight: Sequence[int], rows: Tensor) -> Tensor:
    """Return rows [n, i], float32 or bf16, times the weight of this record: [n, r]."""
    rows = rows.contiguous()
    num_rows, columns, all_rows = len(rows), weight[NUM_COLUMNS], weight[NUM_ROWS]
    sums = torch.empty(num_rows, all_rows)
    out = sums if rows.dtype == torch.float32 else torch.empty(num_rows, all_rows, dtype=rows.dtype)
    rounded = torch.empty(num_rows * row_bytes(columns), dtype=torch.uint8)
    units = -(-all_rows // UNIT_ROWS)
    record = (ctypes.c_int64 * len(weight))(*weight)
    work = (ctypes.c_int64 * 10)(
        rows.data_ptr(), rounded.data_ptr(), ctypes.addressof(record), sums.data_ptr(), out.data_ptr(),
        num_rows, units, *_openmp(),
    )  # fmt: skip
    threads.run(code.address(WORKS[rows.dtype]), ctypes.addressof(work), min(torch.get_num_threads(), units))
    return out


@functools.cache
def _openmp() -> list[int]:
    names = ("omp_get_thread_num", "omp_get_num_threads", "GOMP_barrier")
    return [threads.address_of(name) or 0 for name in names]
