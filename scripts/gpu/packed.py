"""Rows times a packed nf4 weight are those times the unpacked one; microseconds of a layer either way."""

from __future__ import annotations

import torch

from offload.formats.bitsandbytes_4bit import NF4
from scripts.gpu.card import DEVICE, half_dtype, relative_difference, seconds
from scripts.gpu.finding import Finding, judged

SHAPE = (4096, 8192)
ROWS = (1, 4, 16, 64, 128)
MOST_DIFFERENCE = 0.01


def check(*, is_full: bool) -> Finding:
    """Compare both ways, at numbers of rows on both sides of bitsandbytes' rule for the card."""
    dtype = half_dtype()
    packing, parts = NF4.pack(torch.randn(SHAPE, dtype=dtype, device=DEVICE))
    kernel = packing.kernel(SHAPE, dtype, DEVICE)
    assert kernel is not None
    scratch = torch.empty(SHAPE, dtype=dtype, device=DEVICE)
    table = []
    for count in ROWS:
        rows = torch.randn(count, SHAPE[1], dtype=dtype, device=DEVICE)
        ways = {
            "packed": lambda rows=rows: kernel.multiply(parts, rows, None),
            "unpacked": lambda rows=rows: rows @ packing.unpack(parts, scratch).T,
        }
        difference = relative_difference(ways["packed"](), ways["unpacked"]())
        times = {f"{way}_us": 1e6 * seconds(compute, repeats=20) for way, compute in ways.items()}
        table.append({"rows": count, **times, "difference": difference})
    ok = all(row["difference"] <= MOST_DIFFERENCE for row in table)  # not so for NaN
    return judged(ok, {"packed_up_to_rows": kernel.max_rows, "table": table}, "the products differ")
