"""Numbers of four bits, and scales, for all published formats.

Two numbers share a byte, the first in its low half. Both are looked up at once.
"""

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


def halves(packed: Tensor) -> Tensor:
    """Return the halves of bytes, by a table where that is quicker: uint8 [..., n] -> uint8 [..., 2 n]."""
    if packed.device.type == "cpu":
        found = _halves_of_bytes().index_select(0, packed.reshape(-1).int())
        return found.view(torch.uint8).view(*packed.shape[:-1], -1)
    found = packed.new_empty(*packed.shape, 2)
    torch.bitwise_and(packed, 15, out=found[..., 0])
    torch.bitwise_right_shift(packed, 4, out=found[..., 1])
    return found.flatten(-2)


@functools.cache
def _halves_of_bytes() -> Tensor:
    """Return both halves of every byte, as one number each: [256]."""
    every = torch.arange(256)
    return torch.stack((every & 15, every >> 4), dim=-1).to(torch.uint8).view(torch.int16).view(-1)


def float_scale(scale: Tensor) -> Tensor:
    """Return scales in float32; bytes are powers of two (E8M0)."""
    return (scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale).float()


def scale_groups(numbers: Tensor, scale: Tensor, out: Tensor) -> None:
    """Write numbers [n, r, i] times a scale for each group of columns [n, r, G], rounded once."""
    shape = (*scale.shape, -1)
    torch.mul(numbers.view(shape), scale[..., None], out=out.view(shape))
