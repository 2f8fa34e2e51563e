"""GGML's blocks, multiplied as they lie in the file: what streams, heads, and types of five to eight bits.

A card multiplies few rows so (`gguf_on_card`). Kernels for a CPU are compiled for the processor. Where it has bf16
units, more rows than a tree's are multiplied sooner with weights that are unpacked for them; elsewhere the kernel takes
any number of rows.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from offload.formats.gguf_blocks import TYPES, BlockType
from offload.formats.gguf_unpacking import NAMES
from offload.formats.published import PublishedWeight
from offload.formats.storage import PackedStorage, PartShapes
from offload.layouts.gguf_on_card import few_rows, product
from offload.layouts.layout import TREE_ROWS, ComputeLayout, Kernel, is_right
from offload.layouts.onednn import has_onednn
from offload.native.compiler import compiled, has_wide_registers, is_available
from offload.native.weights import NativeWeight, weight_of_parts

UNIT_ROWS = 32  # a weight has a multiple of them
SAMPLE_SHAPE = (UNIT_ROWS, 512)
HEADS_DIMENSIONS = 3  # of a part whose rows of a head's halves stand in turn
LARGEST_ERROR = 1e-4  # of a product, beside its norm


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufBlocks(PackedStorage):
    """Blocks of a matrix of any shape, by which the kernel's speed is measured."""

    block: BlockType

    @property
    def name(self) -> str:
        """The type."""
        return self.block.name

    def part_shapes(self, shape: tuple[int, ...]) -> PartShapes:
        """Return the rows of blocks."""
        *rows, columns = shape
        return {"blocks": ((*rows, columns // self.block.weights * self.block.num_bytes), torch.uint8)}

    def stored_names(self, parameter: str) -> dict[str, str]:
        """Return the name of the blocks."""
        return {"blocks": f"{parameter.removesuffix('.weight')}.gguf_{self.name.lower()}"}

    def unpack(self, parts: Mapping[str, Tensor], out: Tensor) -> Tensor:
        """Return the weight."""
        blocks = parts["blocks"].reshape(-1, self.block.num_bytes)
        self.block.unpack(blocks, numbers := torch.empty(len(blocks), self.block.weights))
        return out.copy_(numbers.view(out.shape))


def native(name: str, columns: int, blocks: Tensor) -> NativeWeight:
    """Return a matrix of blocks uint8 [r, bytes] as its kernel takes it.

    Of blocks [heads, rows of a head, bytes] a head's halves stand in turn.
    """
    blocks, rows = blocks.contiguous(), blocks.shape[:-1].numel()
    head_rows = blocks.shape[1] if blocks.dim() == HEADS_DIMENSIONS else 2  # of two, where all are in order
    return weight_of_parts(_code(name), [blocks], rows=rows, columns=columns, more=[head_rows], takes_rounded=True)


@functools.cache
def _code(name: str) -> Any:
    from offload.native.blocks import blocks_module
    from offload.native.instructions import WIDE

    is_wide = has_wide_registers()
    return compiled(str(blocks_module(name, (4, 2, 1), width=WIDE) if is_wide else blocks_module(name, (4, 3, 2, 1))))


@functools.cache
def _is_right(name: str) -> bool:
    """Return whether the kernel's products are those of unpacked weights, for a row alone by bits as among others."""
    packing = GgufBlocks(block=TYPES[name])
    (shape, dtype), *_ = packing.part_shapes(SAMPLE_SHAPE).values()
    count = shape[0] * shape[1]
    # No byte is above 63, so that no scale of two bytes is infinite.
    blocks = torch.arange(count).mul_(37).remainder_(61).to(dtype).view(shape)
    weight = packing.unpack({"blocks": blocks}, torch.empty(SAMPLE_SHAPE))
    return is_right(native(name, SAMPLE_SHAPE[1], blocks).product, weight, largest_error=LARGEST_ERROR)


def _kernel(stored: PackedStorage, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Kernel | None:
    """Return the product with blocks of a matrix, whose rows have the same bits whatever rows stand beside them."""
    if device.type == "cuda":
        return _kernel_on_card(stored, shape, dtype, device)
    if device.type != "cpu" or dtype not in {torch.bfloat16, torch.float32} or len(shape) != 2 or shape[0] % UNIT_ROWS:
        return None
    is_in_turn = _is_in_turn(stored)
    is_read = is_in_turn or _is_in_order(stored)
    if stored.name not in NAMES or not is_read or not (is_available() and _is_right(stored.name)):
        return None
    is_several = is_in_turn or (isinstance(stored, PublishedWeight) and stored.num_matrices > 1)
    part = stored.name if is_in_turn else "blocks"

    def of_parts(parts: Mapping[str, Any]) -> NativeWeight:
        blocks: Tensor = parts[part]
        # Of several matrices, as an expert's gates and ups, one stands after the other.
        found = native(stored.name, shape[1], blocks.flatten(0, 1) if is_several else blocks)
        return replace(found, in_halves=is_in_turn)

    def multiply(parts: Mapping[str, Tensor], rows: Tensor, bias: Tensor | None) -> Tensor:
        found = of_parts(parts).product(rows)
        if is_in_turn:
            found = found.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        return found if bias is None else found.add_(bias)

    is_unpacked_for_many = dtype == torch.bfloat16 and has_onednn(dtype)
    return Kernel(
        multiply=multiply,
        max_rows=TREE_ROWS if is_unpacked_for_many else sys.maxsize,
        native=of_parts,
    )


def _kernel_on_card(
    stored: PackedStorage, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Kernel | None:
    """Return the product of few rows, for more of which the weight is unpacked."""
    is_in_turn = _is_in_turn(stored)
    if len(shape) != 2 or not (is_in_turn or _is_in_order(stored)):
        return None
    most = few_rows(stored.name, device, dtype)
    part = stored.name if is_in_turn else "blocks"
    is_several = isinstance(stored, PublishedWeight) and stored.num_matrices > 1

    def multiply(parts: Mapping[str, Tensor], rows: Tensor, bias: Tensor | None) -> Tensor:
        blocks, turn = parts[part], (1, 1)
        if is_in_turn:  # first all rows of one matrix, then all of the other
            turn = shape[0] // 2, 2
        elif blocks.dim() == HEADS_DIMENSIONS and not is_several:
            turn = 2, blocks.shape[1] // 2
        return product(stored.name, blocks, rows, bias, turn=turn)

    return Kernel(multiply=multiply, max_rows=most) if most else None


def _is_in_turn(stored: PackedStorage) -> bool:
    """Return whether the weight's rows are in turn those of two matrices, which are of one type."""
    if not isinstance(stored, PublishedWeight) or stored.num_matrices != 1 or stored.is_transposed:
        return False
    return list(stored.parts) == [stored.name]


def _is_in_order(stored: PackedStorage) -> bool:
    if not isinstance(stored, PublishedWeight):
        return isinstance(stored, GgufBlocks)
    if set(stored.parts) != {"blocks"} or stored.is_transposed:
        return False
    return stored.num_matrices == 1 or len(stored.parts["blocks"].shape) < HEADS_DIMENSIONS


GGUF_BLOCKS = ComputeLayout(own=GgufBlocks(block=TYPES["Q8_0"]), kernel=_kernel)
