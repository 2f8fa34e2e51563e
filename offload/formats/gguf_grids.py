"""The grids of GGML's types of one to three bits: which groups of weights there are, by their numbers.

Weights are 2 bits each, four to a byte, or 4 bits each, two to a byte, the lowest first, and stand for the numbers of
`VALUES`. They are those of ggml-common.h, in the packing of the gguf library, and lie in `gguf_grids.json`; IQ1_M has
IQ1_S's.
"""

import functools
import json
from pathlib import Path

import torch
from torch import Tensor

VALUES = {
    "IQ2_XXS": (8, 25, 43), "IQ2_XS": (8, 25, 43), "IQ2_S": (8, 25, 43), "IQ1_S": (-1, 0, 1),
    "IQ3_XXS": (4, 12, 20, 28, 36, 44, 52, 62), "IQ3_S": (1, 3, 5, 7, 9, 11, 13, 15),
}  # fmt: skip


@functools.cache
def grid(name: str, device: torch.device) -> Tensor:
    """Return a type's groups as words of bytes: eight in int64 [groups], or four in int32 [groups]."""
    return _numbers(name).view(torch.int32 if name.startswith("IQ3") else torch.int64).to(device)


@functools.cache
def shifted_grid(device: torch.device) -> Tensor:
    """Return IQ1's groups eight times as large, with one added, and then all with one taken: int64 [2 groups]."""
    numbers = _numbers("IQ1_S") * 8
    return torch.cat((numbers + 1, numbers - 1)).view(torch.int64).to(device)


def _numbers(name: str) -> Tensor:
    """Return the weights of all groups: int8 [groups * weights]."""
    packed = torch.frombuffer(bytearray.fromhex("".join(_packed()[name])), dtype=torch.uint8)
    bits = 4 if len(VALUES[name]) > 4 else 2
    codes = torch.stack([(packed >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)], dim=1)
    return torch.tensor(VALUES[name], dtype=torch.int8)[codes.flatten().long()]


@functools.cache
def _packed() -> dict[str, list[str]]:
    """Return the groups of each type, in lines of hexadecimal."""
    lines: dict[str, list[str]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    return lines


@functools.cache
def signs(device: torch.device) -> Tensor:
    """Return what eight bits mean, the lowest first, as bytes of 1 and -1: int64 [256]."""
    every = torch.arange(256)[:, None] >> torch.arange(8)
    return (1 - 2 * (every & 1)).to(torch.int8).view(torch.int64).view(-1).to(device)


@functools.cache
def even_signs(device: torch.device) -> Tensor:
    """Return what seven bits mean: an eighth makes the number of those that are set even: int64 [128]."""
    every = torch.arange(128)
    parity = (every[:, None] >> torch.arange(7)).sum(dim=1) & 1
    return signs(device)[(every | parity << 7).to(device)]
