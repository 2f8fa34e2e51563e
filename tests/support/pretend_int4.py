"""CUDA's kernel for numbers of four bits, as its source describes the order of a tile, computed on the host.

Source: aten/src/ATen/native/cuda/int4mm.cu. A tile has 8 rows and 16 columns for each inner one; of it each of 32 lanes
holds pairs of columns, in words of eight numbers.
"""

import torch
from torch import Tensor

LANES = torch.arange(32)
IN_WORD = (0, 4, 1, 5, 2, 6, 3, 7)  # the place of the number k of a lane in its word
COLUMNS = (0, 1, 8, 9, 16, 17, 24, 25)  # of a lane's numbers, beside its first


def in_tiles(pairs: Tensor, inner: int) -> Tensor:
    """Return uint8 [r, i / 2], the even column above, as int32 [r / 8, i / (16 inner), 32, inner / 2]."""
    if pairs.dtype != torch.uint8 or pairs.dim() != 2 or pairs.shape[0] % 8 or pairs.shape[1] * 2 % (16 * inner):
        raise RuntimeError(f"CUDA takes no {pairs.dtype} {list(pairs.shape)}")
    numbers = torch.stack((pairs >> 4, pairs & 15), dim=-1).flatten(1).long()
    tiles = numbers.view(numbers.shape[0] // 8, 8, -1, 16 * inner).transpose(1, 2)  # [r / 8, i / 128, 8, 128]
    words = tiles.new_zeros(*tiles.shape[:2], 32, inner // 2)
    for word in range(inner // 2):
        for number, column in enumerate(COLUMNS):
            found = tiles[..., LANES // 4, 32 * word + LANES % 4 * 2 + column]
            words[..., word] |= found << 4 * IN_WORD[number]
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def product(rows: Tensor, words: Tensor, group_size: int, steps: Tensor) -> Tensor:
    """Return bf16 rows [n, i] times (number - 8) * scale + zero, each weight rounded to bf16: [n, r]."""
    if rows.dtype != torch.bfloat16 or not rows.is_contiguous() or group_size not in {32, 64, 128, 256}:
        raise RuntimeError(f"CUDA takes no rows of {rows.dtype}, or groups of {group_size}")
    num_tiles, num_columns, _, num_words = words.shape
    tiles = torch.zeros(num_tiles, num_columns, 8, 32 * num_words, dtype=torch.int64)
    for word in range(num_words):
        for number, column in enumerate(COLUMNS):
            found = words[..., word].long() >> 4 * IN_WORD[number] & 15
            tiles[..., LANES // 4, 32 * word + LANES % 4 * 2 + column] = found
    numbers = tiles.transpose(1, 2).reshape(8 * num_tiles, -1)  # [r, i]
    groups = numbers.T.view(-1, group_size, len(numbers)) - 8
    weights = groups * steps[:, None, :, 0].float() + steps[:, None, :, 1].float()
    rounded = weights.to(torch.bfloat16).double().flatten(0, 1)
    return (rows.double() @ rounded).to(torch.bfloat16)
