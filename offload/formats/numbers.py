"""Numbers of four bits, and scales, for all published formats.

Two numbers share a byte, the first in its low half. Both are looked up at once.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def looked_up(packed: Tensor, numbers: tuple[float, ...]) -> Tensor:
    """Return the numbers that the halves of bytes stand for: uint8 [..., n] -> bfloat16 [..., 2 n]."""
    found = _pairs(numbers, packed.device).index_select(0, packed.reshape(-1).int())
    return found.view(torch.bfloat16).view(*packed.shape[:-1], -1)


@functools.cache
def _pairs(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    """Return both numbers of every byte, as one wide number each: [256]."""
    table = torch.tensor(numbers, dtype=torch.bfloat16, device=device)
    every = torch.arange(256, device=device)
    return torch.stack((table[every & 15], table[every >> 4]), dim=-1).view(torch.int32).view(-1)


def float_scale(scale: Tensor) -> Tensor:
    """Return scales in float32; bytes are powers of two (E8M0)."""
    return (scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale).float()


def scale_groups(numbers: Tensor, scale: Tensor, out: Tensor) -> None:
    """Write numbers [n, r, i] times a scale for each group of columns [n, r, G], rounded once."""
    shape = (*scale.shape, -1)
    torch.mul(numbers.view(shape), scale[..., None], out=out.view(shape))
