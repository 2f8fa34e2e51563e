"""Numbers of float8 (E4M3) with scales of blocks, multiplied as they are published: nothing but the result is rounded.

Where the processor has bf16 units, more rows than a tree's are multiplied sooner with weights that are unpacked.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offload.formats.numbers import float_scale
from offload.formats.published import PublishedWeight
from offload.formats.scaled import BLOCK_SHAPE, num_blocks, unpack_scaled
from offload.formats.storage import PackedStorage, PartShapes
from offload.layouts.layout import TREE_ROWS, ComputeLayout, Kernel, is_right
from offload.layouts.onednn import has_onednn
from offload.native.compiler import compiled, is_available
from offload.native.weights import NativeWeight, float_tiles, weight_of_parts

UNIT, LANES = 32, 16  # rows and columns that a weight has a multiple of; columns of a block
SAMPLE_SHAPE, SAMPLE_BLOCK = (64, 160), (32, 64)
LARGEST_ERROR = 1e-5  # of a product, beside its norm


@dataclass(frozen=True, slots=True, kw_only=True)
class Float8(PackedStorage):
    """A matrix of any shape, by which the kernel's speed is measured."""

    name: str = "fp8"
    block: tuple[int, int] = BLOCK_SHAPE  # rows and columns that share a scale

    def part_shapes(self, shape: tuple[int, ...]) -> PartShapes:
        """Return the numbers and the scales."""
        return {
            "numbers": (shape, torch.float8_e4m3fn),
            "scale": (num_blocks(shape[-2], shape[-1], self.block), torch.float32),
        }

    def stored_names(self, parameter: str) -> dict[str, str]:
        """Return the names of the parts."""
        return {"numbers": parameter, "scale": f"{parameter}_scale_inv"}

    def unpack(self, parts: Mapping[str, Tensor], out: Tensor) -> Tensor:
        """Return the weight."""
        unpack_scaled({name: part[None] for name, part in parts.items()}, out[None], block=self.block)
        return out


def _block_of(stored: PackedStorage, shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Return the rows and columns that share a scale; None where the kernel does not know such a weight."""
    if isinstance(stored, Float8):
        block: tuple[int, int] | None = stored.block
    elif isinstance(stored, PublishedWeight) and stored.num_matrices == 1 and not stored.is_transposed:
        block = stored.scale_block if stored.part_shapes(shape)["numbers"][1] == torch.float8_e4m3fn else None
    else:
        block = None
    is_known = len(shape) == 2 and block is not None and not (shape[0] % UNIT or shape[1] % UNIT)
    return block if is_known and block is not None and (block[1] % LANES == 0 or block[1] >= shape[1]) else None


def native(block: tuple[int, int], shape: tuple[int, int], parts: Mapping[str, Any]) -> NativeWeight:
    """Return a matrix [r, i] as its kernel takes it, for rows of float32."""
    both = [parts["numbers"].detach().contiguous(), float_scale(parts["scale"].detach()).contiguous()]
    (rows, columns), (high, wide) = shape, block
    more = [high, wide, -(-columns // wide)]
    return weight_of_parts(_code(), both, rows=rows, columns=columns, more=more, takes_rounded=False)


@functools.cache
def _code() -> Any:
    from offload.native.float8 import float8_module

    return compiled(str(float8_module(float_tiles())))


@functools.cache
def _is_right() -> bool:
    """Return whether the kernel's products are those of unpacked weights, for a row alone by bits as among others."""
    rows, columns = SAMPLE_SHAPE
    bits = torch.arange(rows * columns).mul_(7).remainder_(253).to(torch.uint8).view(SAMPLE_SHAPE)
    numbers = torch.where(bits & 127 == 127, 1, bits).view(torch.float8_e4m3fn)
    scale = torch.linspace(0.5, 1.5, 6).view(num_blocks(rows, columns, SAMPLE_BLOCK))
    parts = {"numbers": numbers, "scale": scale}
    weight = Float8(block=SAMPLE_BLOCK).unpack(parts, torch.empty(SAMPLE_SHAPE))
    product = native(SAMPLE_BLOCK, SAMPLE_SHAPE, parts).product
    return is_right(product, weight, largest_error=LARGEST_ERROR)


def _kernel(stored: PackedStorage, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Kernel | None:
    """Return the product with a matrix, whose rows have the same bits whatever rows stand beside them."""
    if stored.name != "fp8" or device.type != "cpu" or dtype not in {torch.bfloat16, torch.float32}:
        return None
    block = _block_of(stored, shape)
    if block is None or not (is_available() and _is_right()):
        return None

    of_parts = functools.partial(native, block, (shape[0], shape[1]))

    def product(parts: Mapping[str, Tensor], rows: Tensor, bias: Tensor | None) -> Tensor:
        found = of_parts(parts).product(rows.float()).to(rows.dtype)
        return found if bias is None else found.add_(bias)

    is_unpacked_for_many = dtype == torch.bfloat16 and has_onednn(dtype)
    return Kernel(
        multiply=product,
        max_rows=TREE_ROWS if is_unpacked_for_many else sys.maxsize,
        native=of_parts,
    )


FLOAT8 = ComputeLayout(own=Float8(), kernel=_kernel)
