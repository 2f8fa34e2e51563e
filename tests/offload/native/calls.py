"""Calls of compiled functions with tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from offload.native.compiler import Compiled
from offload.native.rounded_rows import row_bytes

ADDRESS, NUMBER = ctypes.c_void_p, ctypes.c_int64


def rounded(code: Compiled, rows: Tensor) -> Tensor:
    """Return rows float32 [n, i] as the module rounds them: uint8 [n, bytes]."""
    found = torch.empty(len(rows), row_bytes(rows.shape[1]), dtype=torch.uint8)
    round_row = code.function("round_row", ADDRESS, ADDRESS, NUMBER)
    for row, place in zip(rows, found, strict=True):
        round_row(row.data_ptr(), place.data_ptr(), rows.shape[1])
    return found


def product(code: Compiled, rows: Tensor, weight: Sequence[int], units: Sequence[range] | None = None) -> Tensor:
    """Return rows float32 [n, i] times the weight of this record, some units after others."""
    _, _, columns, num_outputs, *_ = weight
    given, out = rounded(code, rows), torch.full((len(rows), num_outputs), torch.nan)
    record = (NUMBER * len(weight))(*weight)
    multiply = code.function("multiply", ADDRESS, ADDRESS, ADDRESS, NUMBER, NUMBER, NUMBER)
    for share in units or [range(num_outputs // 32)]:
        multiply(given.data_ptr(), ctypes.addressof(record), out.data_ptr(), len(rows), share.start, share.stop)
    assert columns == rows.shape[1]
    return out
