"""The order of numbers of four bits in which torch's CUDA kernel multiplies few rows with them, as they are packed.

A tile has 8 rows and 128 columns. torch does not document where each number goes, so numbers that say their own places
are packed on the card, and are looked up; and the kernel is used where its products are those of unpacked weights.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from offload.formats.four_bits_kernel import works_on
from offload.layouts.int4_orders import NUM_ROWS

TILE_ROWS = 8
INNER_TILES = 8  # of 16 columns, that stand together: the most that the kernel knows
TILE_COLUMNS = 16 * INNER_TILES
NUM_DIGITS = 3  # of four bits, in the place of a number within its tile
LARGEST_ERROR = 0.01  # of a product of bf16, beside its largest number
SAMPLE_SHAPE = (NUM_ROWS, 4 * TILE_COLUMNS)
SAMPLE_GROUP = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class TileOrder:
    """The order of a card's kernel."""

    name: str = "tiles"
    num_columns: int = TILE_COLUMNS
    dtypes: ClassVar = (torch.bfloat16,)  # of rows

    def runs_on(self, device: torch.device) -> bool:
        """Return whether torch has the kernel on the device, and it computes there what it should.

        A card that is only planned for is taken for one of those.
        """
        return device.type == "cuda" and (not torch.cuda.device_count() or works_on(device, torch.bfloat16, _is_right))

    def packed(self, numbers: Tensor) -> Tensor:
        """Return numbers [..., r, i] in tiles: the device has to be the card."""
        matrices = numbers.reshape(-1, *numbers.shape[-2:])
        pairs = matrices[..., ::2] << 4 | matrices[..., 1::2]
        packed = [torch.ops.aten._convert_weight_to_int4pack(matrix, INNER_TILES) for matrix in pairs]
        return torch.stack(packed).view(torch.uint8).view(*numbers.shape[:-1], -1)

    def in_columns(self, packed: Tensor, out: Tensor) -> Tensor:
        """Return the numbers of a matrix's rows in tiles, column by column."""
        places = _places_on(packed.device)
        tiles = packed.reshape(-1, len(out) // TILE_COLUMNS, TILE_ROWS * TILE_COLUMNS // 2)
        numbers = torch.stack((tiles & 15, tiles >> 4), dim=-1).flatten(-2).index_select(-1, places)
        in_tiles = numbers.unflatten(-1, (TILE_ROWS, TILE_COLUMNS))  # [r / 8, i / 128, 8, 128]
        out.view(-1, TILE_COLUMNS, len(in_tiles), TILE_ROWS).copy_(in_tiles.permute(1, 3, 0, 2))
        return out

    def product(self, rows: Tensor, packed: Tensor, steps: Tensor, *, group_size: int) -> Tensor:
        """Return rows [n, i] times the weight: [n, r]."""
        in_tiles = packed.view(torch.int32).view(-1, rows.shape[-1] // TILE_COLUMNS, 32, INNER_TILES // 2)
        found: Tensor = torch.ops.aten._weight_int4pack_mm(rows.contiguous(), in_tiles, group_size, steps)
        return found


TILES = TileOrder()


@functools.cache
def _places_on(device: torch.device) -> Tensor:
    """Return the place in a packed tile of each number of the tile, row by row: int64 [8 * 128]."""
    count = TILE_ROWS * TILE_COLUMNS
    own = torch.arange(count, device=device)
    found = torch.zeros(count, dtype=torch.int64, device=device)
    for digit in range(NUM_DIGITS):
        numbers = (own >> 4 * digit & 15).to(torch.uint8).view(TILE_ROWS, TILE_COLUMNS)
        packed = TILES.packed(numbers).flatten()
        found |= torch.stack((packed & 15, packed >> 4), dim=-1).flatten().long() << 4 * digit
    return found.argsort()


def _is_right(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the kernel's products are those of unpacked weights, for a row alone by bits as among others."""
    rows, columns = SAMPLE_SHAPE
    numbers = torch.arange(rows * columns, device=device).mul_(7).remainder_(61).remainder_(16).view(rows, columns)
    scale = torch.linspace(0.5, 1.5, columns // SAMPLE_GROUP * rows, device=device).view(-1, rows)
    steps = torch.stack((scale, 1 - scale), dim=-1).to(dtype)  # [G, r, 2]
    packed = TILES.packed(numbers.to(torch.uint8))
    back = TILES.in_columns(packed, torch.empty(columns, rows, dtype=torch.uint8, device=device))
    if not torch.equal(back.T, numbers.to(torch.uint8)):
        return False
    groups = (numbers.T.view(-1, SAMPLE_GROUP, rows) - 8).float()
    weights = (groups * steps[:, None, :, 0].float() + steps[:, None, :, 1].float()).view(columns, rows)
    given = torch.linspace(-1, 1, 16 * columns, device=device).sin_().view(16, columns).to(dtype)
    product = TILES.product(given, packed, steps, group_size=SAMPLE_GROUP)
    alone = TILES.product(given[:1], packed, steps, group_size=SAMPLE_GROUP)
    expected = given.float() @ weights
    error = (product.float() - expected).abs().max() / expected.abs().max()
    return bool(error < LARGEST_ERROR) and torch.equal(alone, product[:1])
