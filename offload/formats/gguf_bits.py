"""Taking GGML's blocks apart: scales, and numbers of a few bits that share a byte."""

import functools

import torch
from torch import Tensor

FP4_NUMBERS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice what E2M1 means


def half(blocks: Tensor, start: int) -> Tensor:
    """Return the float16 number that begins at a byte of each block: float32 [n, 1]."""
    return blocks[:, start : start + 2].view(torch.float16).float()


def halves(packed: Tensor, groups: int) -> Tensor:
    """Return the halves of bytes, of each group all low ones first: uint8 [n, m] -> [n, groups, 2, m / groups].

    Bytes that follow each other are taken apart ten times as fast as those of blocks with something between them.
    """
    whole = packed.contiguous().unflatten(1, (groups, -1))
    return torch.stack((whole & 15, whole >> 4), dim=2)


def quarters(packed: Tensor, groups: int) -> Tensor:
    """Return numbers of two bits, of each group all lowest ones first: uint8 [n, m] -> [n, groups, 4, m / groups]."""
    whole = packed.contiguous().unflatten(1, (groups, -1))
    return torch.stack([(whole >> shift) & 3 for shift in (0, 2, 4, 6)], dim=2)


def eighths(packed: Tensor) -> Tensor:
    """Return the bits of bytes, all lowest ones first: uint8 [n, m] -> [n, 8, m]."""
    whole = packed.contiguous()
    return torch.stack([(whole >> shift) & 1 for shift in range(8)], dim=1)


@functools.cache
def tables(numbers: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return what the low and the high half of every byte stand for: float32 [256] both."""
    table = torch.tensor(numbers, dtype=torch.float32, device=device)
    every = torch.arange(256, device=device)
    return table[every & 15], table[every >> 4]


def scaled(packed: Tensor, numbers: tuple[int, ...], scale: Tensor, out: Tensor) -> None:
    """Write the numbers that halves of bytes stand for times a scale: uint8 [n, g, 16], [n, g, 1] -> [n, g, 2, 16]."""
    index = packed.reshape(-1).int()
    for half, table in enumerate(tables(numbers, packed.device)):
        torch.mul(table.index_select(0, index).view(packed.shape), scale, out=out[:, :, half])
