"""Rows times packed nf4, int4 and GGUF weights are those times unpacked ones; microseconds of a layer either way."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from offload.checkpoint import TensorEntry
from offload.formats.bitsandbytes_4bit import NF4
from offload.formats.gguf_blocks import TYPES
from offload.formats.storage import PackedStorage, Quantizer
from offload.layouts.gguf_on_card import few_rows, is_right_on, product
from offload.layouts.int4 import Int4, rows_that_are_few
from offload.layouts.int4_tiles import TILES
from offload.layouts.known import kernel_of, storage_of
from offload.layouts.layout import Kernel, Multiply
from scripts.gpu.card import DEVICE, half_dtype, relative_difference, seconds
from scripts.gpu.finding import Finding, judged

SHAPE = (4096, 8192)
ROWS = (1, 4, 16, 64, 128)
MOST_DIFFERENCE = 0.01


GGUF_NAMES = ("Q4_0", "Q8_0", "Q4_K", "Q6_K", "MXFP4")
GGUF_ROWS = (1, 16, 64)


def check(*, is_full: bool) -> Finding:
    """Compare both ways, at numbers of rows on both sides of the rule for the card."""
    dtype = half_dtype()
    tables = {"nf4": quantized(NF4, dtype)}
    few = {"nf4_packed_up_to_rows": kernel_of_card(NF4, dtype).max_rows, "int4_packed_up_to_rows": 0}
    if TILES.runs_on(DEVICE):
        tables["int4"] = quantized(Int4(order=TILES), torch.bfloat16)
        few["int4_packed_up_to_rows"] = rows_that_are_few(TILES, DEVICE)
    is_used = True
    for name in GGUF_NAMES if find_spec("triton") is not None else ():
        is_used = is_right_on(name, DEVICE, dtype) and is_used
        tables[name] = blocks(name, dtype)
        few[f"{name}_packed_up_to_rows"] = few_rows(name, DEVICE, dtype)
    ok = all(row["difference"] <= MOST_DIFFERENCE for table in tables.values() for row in table)  # not so for NaN
    return judged(ok and is_used, {**few, **tables}, "the products differ, or a kernel is not used")


def kernel_of_card(packing: PackedStorage, dtype: torch.dtype) -> Kernel:
    """Return the card's kernel for a matrix."""
    kernel = kernel_of(packing, SHAPE, dtype, DEVICE)
    assert kernel is not None
    return kernel


def quantized(packer: Quantizer, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Return how both ways compare for weights that are rounded here."""
    packing, parts = packer.pack(torch.randn(SHAPE, dtype=dtype, device=DEVICE))
    return compared(packing, parts, kernel_of_card(packing, dtype).multiply, dtype, ROWS)


def blocks(name: str, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Return how both ways compare for GGML's blocks, with finite scales; the kernel is used for few rows alone."""
    block, leaf = TYPES[name], f"m.gguf_{name.lower()}"
    given = torch.randint(61, (SHAPE[0], SHAPE[1] // block.weights * block.num_bytes), device=DEVICE).to(torch.uint8)
    if name == "MXFP4":
        given.view(-1, block.num_bytes)[:, 0] = 120  # an exponent
    stored = {leaf: (TensorEntry.planned(leaf, tuple(given.shape), torch.uint8),)}
    packing = storage_of("m.weight", SHAPE, stored, {"quant_method": "gguf"})
    assert packing is not None
    return compared(
        packing, {"blocks": given}, lambda _parts, rows, bias: product(name, given, rows, bias), dtype, GGUF_ROWS
    )


def compared(
    packing: PackedStorage, parts: Mapping[str, Tensor], multiply: Multiply, dtype: torch.dtype, counts: tuple[int, ...]
) -> list[dict[str, Any]]:
    """Return how both ways compare by the number of rows."""
    scratch = torch.empty(SHAPE, dtype=dtype, device=DEVICE)
    table = []
    for count in counts:
        rows = torch.randn(count, SHAPE[1], dtype=dtype, device=DEVICE)
        ways = {
            "packed": lambda rows=rows: multiply(parts, rows, None),
            "unpacked": lambda rows=rows: rows @ packing.unpack(parts, scratch).T,
        }
        difference = relative_difference(ways["packed"](), ways["unpacked"]())
        times = {f"{way}_us": 1e6 * seconds(compute, repeats=20) for way, compute in ways.items()}
        table.append({"rows": count, **times, "difference": difference})
    return table
