"""GGML's blocks of weights as float32, by torch alone, on a CPU and a GPU alike.

`TYPES` has of every type: its number in a file, weights and bytes of a block, and a function `unpack(blocks, out)`,
uint8 [n, bytes] -> float32 [n, weights], which writes to `out`.

All results are those of the gguf library, bit for bit, on any device: a scale of 11 bits times a factor of 7 at most
and a number of 7 at most has no more than 24 bits. So every product is exact in float32, in whatever order, with or
without fused additions. Rounded is one sum (a weight less its minimum).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.formats.gguf_bits import FP4_NUMBERS, eighths, half, halves, quarters, scaled
from offload.formats.gguf_few_bits import (
    unpack_iq1_m,
    unpack_iq1_s,
    unpack_iq2_s,
    unpack_iq2_xs,
    unpack_iq2_xxs,
    unpack_iq3_s,
    unpack_iq3_xxs,
    unpack_nvfp4,
    unpack_tq1_0,
    unpack_tq2_0,
)

Unpack = Callable[[Tensor, Tensor], None]
Read = Callable[[Tensor], "EvenBlocks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvenBlocks:
    """Blocks whose groups have even steps: weight = number * scale + minimum."""

    numbers: Tensor  # uint8 [n, weights]
    scale: Tensor  # float32 [n, groups]
    minimum: Tensor  # float32 [n, groups]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockType:
    """One of GGML's types of blocks."""

    name: str
    number: int  # in the file
    weights: int  # of a block
    num_bytes: int  # of a block
    unpack: Unpack
    read_even: Read | None = None  # for types of four bits in even steps
    is_unpacked: bool = False  # a block is one number


def scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and minima of a K block's 8 groups, which its first 16 bytes hold: float32 [n, 8, 1] each.

    Two float16 numbers are followed by 8 scales and 8 minima of 6 bits: the first four of both are low bits of a word
    each. The last four have their low halves in a third word, and their high bits above the first four.
    """
    words = blocks[:, :16].view(torch.int32).T.contiguous()  # [4, n]
    halves = words[0].view(torch.float16).view(-1, 2).T.float()  # [2, n]
    first_four = words[1:3] & 0x3F3F3F3F
    last_four = torch.stack((words[3], words[3] >> 4)).bitwise_and_(0x0F0F0F0F)
    last_four |= (words[1:3] >> 2).bitwise_and_(0x30303030)
    factors = torch.stack((first_four, last_four), dim=2).view(torch.uint8).float()  # [2, n, 8]
    scale, minimum = factors.mul_(halves[:, :, None])
    return scale[:, :, None], minimum[:, :, None]


@functools.cache
def _bits(device: torch.device) -> Tensor:
    """Return the eight bits of every byte, the lowest first, each worth 16 in a byte of its own: int64 [256]."""
    every = torch.arange(256, dtype=torch.uint8, device=device)
    shifts = torch.arange(8, dtype=torch.uint8, device=device)
    return (((every[:, None] >> shifts) & 1) << 4).view(torch.int64).view(-1)


def fifth_bits(packed: Tensor) -> Tensor:
    """Return the bits of bytes as 0 or 16: uint8 [n, m] -> [n, 8 m]."""
    found = _bits(packed.device).index_select(0, packed.reshape(-1).int())
    return found.view(torch.uint8).view(packed.shape[0], -1)


def unpack_q8_0(blocks: Tensor, out: Tensor) -> None:
    """Scale; 32 numbers of eight bits."""
    out.copy_(blocks[:, 2:].view(torch.int8))
    out.mul_(half(blocks, 0))


def unpack_q4_0(blocks: Tensor, out: Tensor) -> None:
    """Scale; 32 numbers of four bits, less 8."""
    out.copy_(halves(blocks[:, 2:], 1).view(torch.int8).sub_(8).flatten(1))
    out.mul_(half(blocks, 0))


def unpack_q4_1(blocks: Tensor, out: Tensor) -> None:
    """Scale, minimum; 32 numbers of four bits."""
    out.copy_(halves(blocks[:, 4:], 1).flatten(1))
    out.mul_(half(blocks, 0)).add_(half(blocks, 2))


def unpack_q5_0(blocks: Tensor, out: Tensor) -> None:
    """Scale; 32 fifth bits; 32 numbers of four bits: less 16."""
    out.copy_(q5_0_numbers(blocks))
    out.mul_(half(blocks, 0))


def q5_0_numbers(blocks: Tensor) -> Tensor:
    """Return the numbers of Q5_0: int8 [n, 32]."""
    numbers = halves(blocks[:, 6:], 1).flatten(1)
    numbers |= fifth_bits(blocks[:, 2:6])
    return numbers.view(torch.int8).sub_(16)


def unpack_q5_1(blocks: Tensor, out: Tensor) -> None:
    """Scale, minimum; 32 fifth bits; 32 numbers of four bits."""
    numbers = halves(blocks[:, 8:], 1).flatten(1)
    numbers |= fifth_bits(blocks[:, 4:8])
    out.copy_(numbers)
    out.mul_(half(blocks, 0)).add_(half(blocks, 2))


IQ4_NUMBERS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def unpack_iq4_nl(blocks: Tensor, out: Tensor) -> None:
    """Scale; 32 numbers out of 16 that are not evenly spaced."""
    scaled(blocks[:, None, 2:], IQ4_NUMBERS, half(blocks, 0)[:, None], out.view(-1, 1, 2, 16))


def unpack_mxfp4(blocks: Tensor, out: Tensor) -> None:
    """Exponent of a power of two; 32 numbers of E2M1.

    Numbers are twice as large in the table, so half the power is used: its exponent is one less, and denormal below 2.
    """
    exponents = blocks[:, :1].int()
    powers = torch.where(exponents < 2, 0x00200000 << exponents.clamp(max=1), (exponents - 1) << 23)
    scaled(blocks[:, None, 1:], FP4_NUMBERS, powers.view(torch.float32)[:, None], out.view(-1, 1, 2, 16))


def unpack_q4_k(blocks: Tensor, out: Tensor) -> None:
    """Scale, minimum; 8 of each in 6 bits; 256 numbers of four bits in 8 groups."""
    scale, minimum = scales_and_minima(blocks)
    groups = out.view(-1, 8, 32)
    groups.copy_(halves(blocks[:, 16:], 4).view(-1, 8, 32))
    groups.mul_(scale).sub_(minimum)


def unpack_q5_k(blocks: Tensor, out: Tensor) -> None:
    """As Q4_K, with a fifth bit for each number: bit k of 32 bytes is that of group k."""
    scale, minimum = scales_and_minima(blocks)
    numbers = eighths(blocks[:, 16:48]).bitwise_left_shift_(4)
    numbers |= halves(blocks[:, 48:], 4).view(-1, 8, 32)
    groups = out.view(-1, 8, 32)
    groups.copy_(numbers)
    groups.mul_(scale).sub_(minimum)


def unpack_q6_k(blocks: Tensor, out: Tensor) -> None:
    """256 low halves, 256 times two high bits, 16 scales of eight bits, scale; numbers are less 32."""
    scale = blocks[:, 192:208].view(torch.int8).float().mul_(half(blocks, 208))
    groups = out.view(-1, 16, 16)
    groups.copy_(q6_k_numbers(blocks).view(-1, 16, 16))
    groups.mul_(scale[:, :, None])


def q6_k_numbers(blocks: Tensor) -> Tensor:
    """Return the numbers of Q6_K: int8, in order."""
    numbers = quarters(blocks[:, 128:192], 2).bitwise_left_shift_(4)
    numbers |= halves(blocks[:, :128], 2).view(-1, 2, 4, 32)
    return numbers.view(torch.int8).sub_(32)


def unpack_q3_k(blocks: Tensor, out: Tensor) -> None:
    """256 third bits, 256 times two low bits, 16 scales of six bits, scale; numbers without a third bit are less 4."""
    numbers = eighths(blocks[:, :32]).bitwise_left_shift_(2)
    numbers |= quarters(blocks[:, 32:96], 2).view(-1, 8, 32)
    low, high = halves(blocks[:, 96:104], 1).flatten(1), quarters(blocks[:, 104:108], 1).flatten(1)
    low |= high.bitwise_left_shift_(4)
    scale = low.view(torch.int8).sub_(32).float().mul_(half(blocks, 108))
    groups = out.view(-1, 16, 16)
    groups.copy_(numbers.view(torch.int8).sub_(4).view(-1, 16, 16))
    groups.mul_(scale[:, :, None])


def unpack_q2_k(blocks: Tensor, out: Tensor) -> None:
    """16 times a scale and a minimum of four bits, 256 numbers of two bits, scale, minimum."""
    factors = halves(blocks[:, :16], 1)[:, 0].transpose(0, 1).float()  # [2, n, 16]: scales, minima
    scale, minimum = factors[0].mul_(half(blocks, 80)), factors[1].mul_(half(blocks, 82))
    groups = out.view(-1, 16, 16)
    groups.copy_(quarters(blocks[:, 16:80], 2).view(-1, 16, 16))
    groups.mul_(scale[:, :, None]).sub_(minimum[:, :, None])


def unpack_iq4_xs(blocks: Tensor, out: Tensor) -> None:
    """Scale; 8 scales of six bits, in two parts; 256 numbers out of 16 that are not evenly spaced."""
    low = blocks[:, 4:8].contiguous()
    numbers = torch.stack((low & 15, low >> 4), dim=2).flatten(1)
    high = blocks[:, 2:4].contiguous()
    numbers |= torch.stack([(high >> shift) & 3 for shift in (0, 2, 4, 6)], dim=2).bitwise_left_shift_(4).flatten(1)
    scale = numbers.view(torch.int8).sub_(32).float().mul_(half(blocks, 0))
    scaled(blocks[:, 8:].unflatten(1, (8, 16)), IQ4_NUMBERS, scale[:, :, None], out.view(-1, 8, 2, 16))


def _read_q4_0(blocks: Tensor) -> EvenBlocks:
    scale = half(blocks, 0)
    return EvenBlocks(numbers=halves(blocks[:, 2:], 1).flatten(1), scale=scale, minimum=scale * -8)


def _read_q4_1(blocks: Tensor) -> EvenBlocks:
    numbers = halves(blocks[:, 4:], 1).flatten(1)
    return EvenBlocks(numbers=numbers, scale=half(blocks, 0), minimum=half(blocks, 2))


def _read_q4_k(blocks: Tensor) -> EvenBlocks:
    scale, minimum = scales_and_minima(blocks)
    return EvenBlocks(numbers=halves(blocks[:, 16:], 4).flatten(1), scale=scale[..., 0], minimum=-minimum[..., 0])


def _unpacked(dtype: torch.dtype) -> Unpack:
    """Return what reads numbers as they are."""

    def unpack(blocks: Tensor, out: Tensor) -> None:
        out.copy_(blocks.view(dtype))

    return unpack


def _type(
    name: str, number: int, weights: int, num_bytes: int, unpack: Unpack, read_even: Read | None = None
) -> BlockType:
    return BlockType(
        name=name, number=number, weights=weights, num_bytes=num_bytes, unpack=unpack, read_even=read_even,
        is_unpacked=weights == 1,
    )  # fmt: skip


UNPACKED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64}
TYPES = {kind.name: kind for kind in (
    _type("F32", 0, 1, 4, _unpacked(torch.float32)),
    _type("F16", 1, 1, 2, _unpacked(torch.float16)),
    _type("Q4_0", 2, 32, 18, unpack_q4_0, _read_q4_0),
    _type("Q4_1", 3, 32, 20, unpack_q4_1, _read_q4_1),
    _type("Q5_0", 6, 32, 22, unpack_q5_0),
    _type("Q5_1", 7, 32, 24, unpack_q5_1),
    _type("Q8_0", 8, 32, 34, unpack_q8_0),
    _type("Q2_K", 10, 256, 84, unpack_q2_k),
    _type("Q3_K", 11, 256, 110, unpack_q3_k),
    _type("Q4_K", 12, 256, 144, unpack_q4_k, _read_q4_k),
    _type("Q5_K", 13, 256, 176, unpack_q5_k),
    _type("Q6_K", 14, 256, 210, unpack_q6_k),
    _type("IQ2_XXS", 16, 256, 66, unpack_iq2_xxs),
    _type("IQ2_XS", 17, 256, 74, unpack_iq2_xs),
    _type("IQ3_XXS", 18, 256, 98, unpack_iq3_xxs),
    _type("IQ1_S", 19, 256, 50, unpack_iq1_s),
    _type("IQ4_NL", 20, 32, 18, unpack_iq4_nl),
    _type("IQ3_S", 21, 256, 110, unpack_iq3_s),
    _type("IQ2_S", 22, 256, 82, unpack_iq2_s),
    _type("IQ4_XS", 23, 256, 136, unpack_iq4_xs),
    _type("IQ1_M", 29, 256, 56, unpack_iq1_m),
    _type("BF16", 30, 1, 2, _unpacked(torch.bfloat16)),
    _type("TQ1_0", 34, 256, 54, unpack_tq1_0),
    _type("TQ2_0", 35, 256, 66, unpack_tq2_0),
    _type("MXFP4", 39, 32, 17, unpack_mxfp4),
    _type("NVFP4", 40, 64, 36, unpack_nvfp4),
)}  # fmt: skip
IDS = _type("I64", 27, 1, 8, _unpacked(torch.int64))  # which are no weights
BY_NUMBER = {kind.number: kind for kind in (*TYPES.values(), IDS)}
LEAVES = {f"gguf_{kind.name.lower()}": kind for kind in TYPES.values()}  # the name of a weight's part -> its type
