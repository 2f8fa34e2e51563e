"""Triton's kernel unpacks the FP4 of gpt-oss' experts as the table of torch's operations does, number for number."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from edgespec.model.device import is_before_ampere
from offload.formats.fp4 import unpack_by_table
from offload.formats.fp4_kernel import kernel_on, unpack_by_kernel
from scripts.gpu.card import DEVICE, seconds
from scripts.gpu.finding import Finding, judged, skipped

EXPERTS, ROWS, COLUMNS, GROUP = 4, 5760, 2880, 32


def check(*, is_full: bool) -> Finding:
    """Compare experts at their real size, with all bytes and with scales from 2^-127 on."""
    if find_spec("triton") is None:
        return skipped("Triton is not installed: torch's operations unpack")
    is_used = kernel_on(DEVICE, unpack_by_table) is not None
    if not is_used and is_before_ampere(DEVICE):
        return skipped("Triton knows no bf16 on this card: torch's operations unpack")
    packed = torch.randint(256, (EXPERTS, ROWS, COLUMNS // 2), device=DEVICE).to(torch.uint8)
    scale = torch.exp2(torch.randint(-127, 126, (EXPERTS, ROWS, COLUMNS // GROUP), device=DEVICE).float())
    found, expected = (torch.empty(EXPERTS, ROWS, COLUMNS, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    unpack_by_kernel(packed, scale, found)  # an error of the compiler is to be seen
    unpack_by_table(packed, scale, expected)
    report = {
        "differing": int((found != expected).sum()),
        "is_used": is_used,
        "kernel_ms": 1e3 * seconds(lambda: unpack_by_kernel(packed, scale, found)),
        "table_ms": 1e3 * seconds(lambda: unpack_by_table(packed, scale, expected)),
    }
    return judged(not report["differing"] and report["is_used"], report, "the kernel differs, or is not used")
