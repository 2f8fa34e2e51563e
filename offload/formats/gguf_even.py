"""The even steps of GGML's blocks of five and eight bits: whole numbers from 0 on, a scale and a minimum each group."""

from __future__ import annotations

import torch
from torch import Tensor

from offload.formats.gguf_bits import eighths, half, halves
from offload.formats.gguf_blocks import EvenBlocks, Read, fifth_bits, scales_and_minima


def _read_q8_0(blocks: Tensor) -> EvenBlocks:
    numbers, scale = blocks[:, 2:] ^ 128, half(blocks, 0)  # from -128 on: their highest bit says which half
    return EvenBlocks(numbers=numbers, scale=scale, minimum=scale * -128)


def _read_q5_0(blocks: Tensor) -> EvenBlocks:
    numbers, scale = halves(blocks[:, 6:], 1).flatten(1) | fifth_bits(blocks[:, 2:6]), half(blocks, 0)
    return EvenBlocks(numbers=numbers, scale=scale, minimum=scale * -16)


def _read_q5_1(blocks: Tensor) -> EvenBlocks:
    numbers = halves(blocks[:, 8:], 1).flatten(1) | fifth_bits(blocks[:, 4:8])
    return EvenBlocks(numbers=numbers, scale=half(blocks, 0), minimum=half(blocks, 2))


def _read_q5_k(blocks: Tensor) -> EvenBlocks:
    scale, minimum = scales_and_minima(blocks)
    numbers = torch.bitwise_left_shift(eighths(blocks[:, 16:48]), 4) | halves(blocks[:, 48:], 4).view(-1, 8, 32)
    return EvenBlocks(numbers=numbers.flatten(1), scale=scale[..., 0], minimum=-minimum[..., 0])


# type -> bits of a number, what reads them; those of four bits are read beside their types
EVEN_READS: dict[str, tuple[int, Read]] = {
    "Q5_0": (5, _read_q5_0), "Q5_1": (5, _read_q5_1), "Q5_K": (5, _read_q5_k), "Q8_0": (8, _read_q8_0),
}  # fmt: skip
