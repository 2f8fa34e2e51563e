"""GGML's types of one to three bits, of three values, and NVFP4.

Weights of one to three bits come in groups of four or eight, which a grid lists (`gguf_grids.py`), with signs apart.
Numbers and signs are looked up as words of bytes, and multiplied as bytes: all are exact, as in `gguf_blocks.py`.
"""

import functools

import torch
from torch import Tensor

from offload.formats.gguf_bits import FP4_NUMBERS, half, quarters, scaled
from offload.formats.gguf_grids import even_signs, grid, shifted_grid, signs

NUM_DIGITS = 5  # numbers of three values in a byte


def _words(blocks: Tensor, start: int, end: int, dtype: torch.dtype) -> Tensor:
    """Return bytes of each block as whole numbers: int32 [n, words]; those of 16 bits without a sign."""
    words = blocks[:, start:end].contiguous().view(dtype).int()
    return words & 0xFFFF if dtype is torch.int16 else words


def _pieces(words: Tensor, bits: int, count: int) -> Tensor:
    """Return numbers of a few bits, the lowest of each word first: int32 [n, words] -> [n, words * count]."""
    mask = (1 << bits) - 1
    return torch.stack([(words >> bits * place) & mask for place in range(count)], dim=2).flatten(1)


def _write(numbers: Tensor, sign: Tensor | None, scale: Tensor, out: Tensor) -> None:
    """Write words of bytes, perhaps times those of signs, times a scale for each group [n, groups]."""
    found = numbers.view(torch.int8)
    if sign is not None:
        found = found.mul_(sign.view(torch.int8))
    groups = out.view(*scale.shape, -1)
    groups.copy_(found.view(groups.shape))
    groups.mul_(scale[:, :, None])


def _selected(table: Tensor, index: Tensor) -> Tensor:
    return table.index_select(0, index.reshape(-1).int())


def _odd_scale(blocks: Tensor, scale: Tensor, factor: float) -> Tensor:
    """Return scales of four bits, and a half more, times the block's: [n, groups]."""
    return half(blocks, 0) * scale.float().add_(0.5) * factor


def unpack_iq2_xxs(blocks: Tensor, out: Tensor) -> None:
    """Scale; 8 groups: four numbers of groups of 8, four times seven signs and a scale of four bits."""
    words = _words(blocks, 2, 66, torch.int32).view(-1, 8, 2)
    index = words[..., 0].contiguous().view(torch.uint8)
    sign = _selected(even_signs(blocks.device), _pieces(words[..., 1], 7, 4))
    _write(
        _selected(grid("IQ2_XXS", blocks.device), index), sign, _odd_scale(blocks, words[..., 1] >> 28 & 15, 0.25), out
    )


def unpack_iq2_xs(blocks: Tensor, out: Tensor) -> None:
    """Scale; 32 numbers of groups with seven signs above; 16 scales of four bits."""
    words = _words(blocks, 2, 66, torch.int16)
    sign = _selected(even_signs(blocks.device), words >> 9)
    scale = _odd_scale(blocks, _pieces(blocks[:, 66:74], 4, 2), 0.25)
    _write(_selected(grid("IQ2_XS", blocks.device), words & 511), sign, scale, out)


def unpack_iq2_s(blocks: Tensor, out: Tensor) -> None:
    """Scale; 32 low bytes of numbers of groups; 32 times eight signs; two high bits each; 16 scales of four bits."""
    index = blocks[:, 2:34].int() | _pieces(blocks[:, 66:74].int(), 2, 4) << 8
    sign = _selected(signs(blocks.device), blocks[:, 34:66])
    scale = _odd_scale(blocks, _pieces(blocks[:, 74:82], 4, 2), 0.25)
    _write(_selected(grid("IQ2_S", blocks.device), index), sign, scale, out)


def unpack_iq3_xxs(blocks: Tensor, out: Tensor) -> None:
    """Scale; 64 numbers of groups of 4; 8 times four times seven signs and a scale of four bits."""
    words = _words(blocks, 66, 98, torch.int32)
    sign = _selected(even_signs(blocks.device), _pieces(words, 7, 4))
    numbers = _selected(grid("IQ3_XXS", blocks.device), blocks[:, 2:66])
    _write(numbers, sign, _odd_scale(blocks, words >> 28 & 15, 0.5), out)


def unpack_iq3_s(blocks: Tensor, out: Tensor) -> None:
    """Scale; 64 low bytes of numbers of groups of 4; a high bit each; 32 times eight signs; 8 scales of four bits."""
    index = blocks[:, 2:66].int() | _pieces(blocks[:, 66:74].int(), 1, 8) << 8
    sign = _selected(signs(blocks.device), blocks[:, 74:106])
    scale = half(blocks, 0) * (_pieces(blocks[:, 106:110], 4, 2) * 2 + 1).float()
    _write(_selected(grid("IQ3_S", blocks.device), index), sign, scale, out)


def unpack_iq1_s(blocks: Tensor, out: Tensor) -> None:
    """Scale; 32 low bytes of numbers of groups; 8 times four times three high bits, a scale of three and a sign."""
    words = _words(blocks, 34, 50, torch.int16)
    is_less = (words >> 15).repeat_interleave(4, dim=1)
    index = blocks[:, 2:34].int() | _pieces(words, 3, 4) << 8 | is_less << 11
    scale = half(blocks, 0) * ((words >> 12 & 7) * 2 + 1).float() * 0.125
    _write(_selected(shifted_grid(blocks.device), index), None, scale, out)


def unpack_iq1_m(blocks: Tensor, out: Tensor) -> None:
    """32 low bytes of numbers of groups; three high bits and a sign each; 16 scales of three bits; scale in pieces."""
    words = _words(blocks, 48, 56, torch.int16)
    high = words >> 12
    pieces = high[:, :1] | high[:, 1:2] << 4 | high[:, 2:3] << 8 | high[:, 3:] << 12
    whole = pieces.to(torch.int16).view(torch.float16).float()  # [n, 1]
    index = blocks[:, :32].int() | _pieces(blocks[:, 32:48].int(), 4, 2) << 8
    scale = whole * (_pieces(words, 3, 4) * 2 + 1).float() * 0.125
    _write(_selected(shifted_grid(blocks.device), index), None, scale, out)


@functools.cache
def _digits(device: torch.device) -> Tensor:
    """Return the numbers of three values that bytes hold, a fraction of 3^5 each: float32 [digits, 256]."""
    every = torch.arange(256, device=device)
    return torch.stack([((every * 3**place & 255) * 3 >> 8) - 1 for place in range(NUM_DIGITS)]).float()


def unpack_tq1_0(blocks: Tensor, out: Tensor) -> None:
    """32, 16 and 4 bytes of numbers of three values, of each all first ones first; scale."""
    start = 0
    for first, num_bytes, count in ((0, 32, 5), (32, 16, 5), (48, 4, 4)):
        packed = blocks[:, first : first + num_bytes].contiguous()
        for table in _digits(blocks.device)[:count]:
            out[:, start : start + num_bytes].copy_(_selected(table, packed).view(packed.shape))
            start += num_bytes
    out.mul_(half(blocks, 52))


def unpack_tq2_0(blocks: Tensor, out: Tensor) -> None:
    """256 numbers of two bits, less 1; scale."""
    out.copy_(quarters(blocks[:, :64], 2).view(torch.int8).sub_(1).flatten(1))
    out.mul_(half(blocks, 64))


@functools.cache
def _fp8_halves(device: torch.device) -> Tensor:
    """Return half of what bytes mean as E4M3 without a sign; the number that is none is 0: float32 [256]."""
    every = torch.arange(256, device=device)
    found = (every & 127).to(torch.uint8).view(torch.float8_e4m3fn).float() * 0.5
    return torch.where(every == 127, 0.0, torch.where(every == 255, 240.0, found))


def unpack_nvfp4(blocks: Tensor, out: Tensor) -> None:
    """4 scales of eight bits; 4 groups of 16 numbers of E2M1, which are twice as large in the table."""
    scale = _selected(_fp8_halves(blocks.device), blocks[:, :4]).view(-1, 4, 1)
    scaled(blocks[:, 4:].unflatten(1, (4, 8)), FP4_NUMBERS, scale, out.view(-1, 4, 2, 8))
