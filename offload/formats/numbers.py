"""Numbers of four bits, and scales: what the published formats have in common.

Two numbers share a byte, the first in its low half. Both are looked up at once.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

WHOLE_NUMBERS = tuple(float(number) for number in range(16))
FP4_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)  # E2M1


def looked_up(packed: Tensor, numbers: tuple[float, ...]) -> Tensor:
    """Return the numbers that the halves of bytes stand for: uint8 [..., n] -> float32 [..., 2 n]."""
    found = _pairs(numbers, packed.device).index_select(0, packed.reshape(-1).int())
    return found.view(torch.float32).view(*packed.shape[:-1], -1)


@functools.cache
def _pairs(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    """Return both numbers of every byte, as one wide number each: [256]."""
    table = torch.tensor(numbers, device=device)
    every = torch.arange(256, device=device)
    return torch.stack((table[every & 15], table[every >> 4]), dim=-1).view(torch.int64).view(-1)


def bytes_of(words: Tensor) -> Tensor:
    """Return the bytes of 32-bit words, the lowest first: int32 [..., n] -> uint8 [..., 4 n]."""
    flat = words.contiguous().view(-1)  # a last dimension of one may have any stride
    return flat.view(torch.uint8).view(*words.shape[:-1], -1)


def whole_numbers(words: Tensor, bits: int) -> Tensor:
    """Return the numbers from 0 on that 32-bit words are made of: int32 [..., n] -> float32 [..., n * 32 / bits]."""
    return bytes_of(words).float() if bits == 8 else looked_up(bytes_of(words), WHOLE_NUMBERS)


def float_scale(scale: Tensor) -> Tensor:
    """Return scales in float32; bytes are powers of two (E8M0)."""
    return (scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale).float()


def scale_groups(numbers: Tensor, scale: Tensor, out: Tensor) -> None:
    """Write numbers [n, r, i] times a scale for each group of columns [n, r, G]."""
    shape = (*scale.shape, -1)
    torch.mul(numbers.view(shape), scale[..., None], out=out.view(shape))
