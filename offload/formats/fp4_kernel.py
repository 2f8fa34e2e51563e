"""FP4 unpacked by one kernel of Triton, which comes with torch on Linux: a card then moves each byte once."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger("edgespec.offload")

AT_ONCE = 1024  # numbers of one program

Unpack = Callable[[Tensor, Tensor, Tensor], None]  # packed [n, r, i / 2], scale [n, r, G], out [n, r, i]


@functools.cache
def kernel_on(device: torch.device, reference: Unpack) -> Unpack | None:
    """Return the kernel where it works on a card and does what `reference` does; None on other devices."""
    if device.type != "cuda":
        return None
    try:
        # Every byte, in groups of 32 numbers; among the scales is one whose products bf16 holds with fewer digits.
        every = torch.arange(256, dtype=torch.uint8, device=device).view(1, 4, 64)
        scale = torch.tensor([2.0**-130, 0.3, 1.0, 2.0**125], device=device).repeat(4).view(1, 4, 4)
        found, expected = (torch.empty(1, 4, 128, dtype=torch.bfloat16, device=device) for _ in range(2))
        unpack_by_kernel(every, scale, found)
        reference(every, scale, expected)
        if torch.equal(found, expected):
            return unpack_by_kernel
        logger.warning("the kernel that unpacks FP4 differs from torch's operations, which are used")
    except Exception as error:  # no Triton, no compiler, or a card that it does not know
        logger.info("FP4 is unpacked by torch's operations: %s", error)
    return None


def unpack_by_kernel(packed: Tensor, scale: Tensor, out: Tensor) -> None:
    """Write packed numbers times float32 scales, rounded once to the dtype of `out`; all tensors are contiguous."""
    count = out.numel()
    group = out.shape[-1] // scale.shape[-1]
    programs = -(-count // AT_ONCE)
    with torch.cuda.device(out.device) if out.is_cuda else torch.no_grad():
        _kernel()[programs,](packed, scale, out, count, group, AT_ONCE)


@functools.cache
def _kernel() -> Any:
    """Return the kernel, which is compiled for a card when it is first called."""
    triton, tl = import_module("triton"), import_module("triton.language")

    def unpack(packed, scale, out, count, group, at_once: tl.constexpr):  # type: ignore
        place = tl.program_id(0).to(tl.int64) * at_once + tl.arange(0, at_once)
        is_there = place < count
        byte = tl.load(packed + place // 2, mask=is_there, other=0).to(tl.int32)
        code = (byte >> ((place % 2) * 4).to(tl.int32)) & 15
        # E2M1: from 1 on the same bits as float32, with another bias; below there are 0 and a half.
        bits = (((code >> 1) & 3) + 126 << 23) | ((code & 1) << 22)
        size = tl.where((code & 7) < 2, (code & 1).to(tl.float32) * 0.5, bits.to(tl.float32, bitcast=True))
        number = tl.where(code > 7, -size, size)
        product = number * tl.load(scale + place // group, mask=is_there, other=0.0)
        tl.store(out + place, product.to(out.dtype.element_ty), mask=is_there)

    return triton.jit(unpack)
