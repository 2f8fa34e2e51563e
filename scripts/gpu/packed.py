"""Rows times packed nf4 and int4 weights are those times the unpacked ones; microseconds of a layer either way."""

from typing import Any

import torch

from offload.formats.bitsandbytes_4bit import NF4
from offload.formats.storage import Quantizer
from offload.layouts.int4 import Int4, rows_that_are_few
from offload.layouts.int4_tiles import TILES
from offload.layouts.known import kernel_of
from scripts.gpu.card import DEVICE, half_dtype, relative_difference, seconds
from scripts.gpu.finding import Finding, judged

SHAPE = (4096, 8192)
ROWS = (1, 4, 16, 64, 128)
MOST_DIFFERENCE = 0.01


def check(*, is_full: bool) -> Finding:
    """Compare both ways, at numbers of rows on both sides of the rule for the card."""
    tables = {"nf4": compared(NF4, half_dtype())}
    if TILES.runs_on(DEVICE):
        tables["int4"] = compared(Int4(order=TILES), torch.bfloat16)
    ok = all(row["difference"] <= MOST_DIFFERENCE for table in tables.values() for row in table)  # not so for NaN
    kernel = kernel_of(NF4, SHAPE, half_dtype(), DEVICE)
    assert kernel is not None
    few = {
        "nf4_packed_up_to_rows": kernel.max_rows,
        "int4_packed_up_to_rows": rows_that_are_few(TILES, DEVICE) if "int4" in tables else 0,
    }
    return judged(ok, {**few, **tables}, "the products differ")


def compared(packer: Quantizer, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Return how both ways compare by the number of rows."""
    packing, parts = packer.pack(torch.randn(SHAPE, dtype=dtype, device=DEVICE))
    kernel = kernel_of(packing, SHAPE, dtype, DEVICE)
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
    return table
