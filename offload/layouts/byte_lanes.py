"""Blocks of Q8_0, Q6_K and Q5_0 in the order of `native/bytes.py`, in which they are put when they are loaded.

Numbers have a byte each, and scales are those of the blocks: products are those of the blocks as they lie, but for the
order in which float32 sums are rounded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from offload.formats.gguf_blocks import TYPES, q5_0_numbers, q6_k_numbers
from offload.formats.published import PublishedWeight
from offload.formats.storage import PackedStorage, PartShapes, StoredParameter
from offload.layouts.gguf_blocks import HEADS_DIMENSIONS
from offload.layouts.layout import Kernel, LosslessLayout, Repacked, is_right
from offload.native.compiler import compiled, has_wide_registers, is_available
from offload.native.weights import NativeWeight, weight_of_parts

NUM_ROWS, FACTOR_COLUMNS = 32, 16
FACTOR_BYTES = 256 // FACTOR_COLUMNS * NUM_ROWS  # of a block of rows and 256 columns, before its scales
ORDER = "pairs32"
NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q8_0": lambda blocks: blocks[:, 2:].view(torch.int8), "Q5_0": q5_0_numbers, "Q6_K": q6_k_numbers,
}  # fmt: skip
KINDS = tuple(NUMBERS)
WITH_FACTORS = "Q6_K"
LARGEST_ERROR = 1e-4  # of a product, beside its norm
DTYPES = (torch.bfloat16, torch.float32)  # of rows


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteLanes(PackedStorage):
    """The facts of one weight."""

    name: str = "byte-lanes"
    kind: str = "Q8_0"

    @property
    def _columns(self) -> int:
        """How many share a scale."""
        return TYPES[self.kind].weights

    def detect(self, weight: StoredParameter) -> ByteLanes | None:
        """Find the format by its numbers, whose name says their type and order."""
        kind = next((kind for kind in KINDS if f"{weight.name}.{kind.lower()}_{ORDER}" in weight.stored), None)
        return None if kind is None else replace(self, kind=kind)

    def part_shapes(self, shape: tuple[int, ...]) -> PartShapes:
        """Return the numbers, and for 32 rows scales of each group of columns: of Q6_K with factors before them."""
        rows, columns = shape
        groups = columns // self._columns
        if self.kind != WITH_FACTORS:
            steps = (rows // NUM_ROWS, groups, NUM_ROWS), torch.float16
        else:
            steps = (rows // NUM_ROWS, groups, FACTOR_BYTES + 2 * NUM_ROWS), torch.uint8
        return {"numbers": (shape, torch.int8), "steps": steps}

    def stored_names(self, parameter: str) -> dict[str, str]:
        """Return the names of the parts."""
        kind = self.kind.lower()
        return {"numbers": f"{parameter}.{kind}_{ORDER}", "steps": f"{parameter}.{kind}_steps"}

    def parts_of(self, blocks: Tensor) -> dict[str, Tensor]:
        """Return the parts of rows of blocks uint8 [r, bytes]."""
        rows = len(blocks)
        by_block = blocks.reshape(-1, TYPES[self.kind].num_bytes)
        numbers = NUMBERS[self.kind](by_block).reshape(rows, -1)
        if self.kind != WITH_FACTORS:
            steps = by_block[:, :2].contiguous().view(torch.float16).view(-1, NUM_ROWS, len(by_block) // rows)
            steps = steps.mT.contiguous()
        else:
            facts = (by_block[:, start:end].reshape(rows, -1, end - start) for start, end in ((192, 208), (208, 210)))
            in_units = (one.unflatten(0, (-1, NUM_ROWS)).transpose(1, 2) for one in facts)  # [r / 32, B, 32, 16 or 2]
            factors, scales = in_units
            steps = torch.cat((factors.mT.flatten(-2), scales.flatten(-2)), dim=-1)
        pairs = numbers.contiguous().view(torch.int16).unflatten(0, (-1, NUM_ROWS))  # [r / 32, 32, i / 2]
        return {"numbers": pairs.mT.contiguous().view(torch.int8).view(rows, -1), "steps": steps}

    def unpack(self, parts: Mapping[str, Tensor], out: Tensor) -> Tensor:
        """Return the weight: each number is rounded once."""
        rows, columns = out.shape
        pairs = parts["numbers"].view(torch.int16).view(-1, columns // 2, NUM_ROWS).mT.contiguous()
        numbers, steps = pairs.view(torch.int8).view(rows, -1), parts["steps"]
        if self.kind != WITH_FACTORS:
            scale = steps.mT.float()  # [r / 32, 32, B]
        else:
            factors = steps[..., :FACTOR_BYTES].view(torch.int8).unflatten(-1, (-1, NUM_ROWS))  # [r / 32, B, 16, 32]
            scales = steps[..., FACTOR_BYTES:].contiguous().view(torch.float16).float()[..., None, :]
            scale = (factors * scales).movedim(-1, 1)  # [r / 32, 32, B, 16]
        scale = scale.reshape(rows, -1)
        return out.copy_((numbers.float().unflatten(-1, (scale.shape[-1], -1)) * scale[..., None]).flatten(-2))

    def multiply(self, parts: Mapping[str, Tensor], rows: Tensor, bias: Tensor | None) -> Tensor:
        """Return rows [..., i], bf16 or float32, times the weight, and the bias: [..., r]."""
        found = self.native(parts).product(rows)
        return found if bias is None else found.add_(bias)

    def native(self, parts: Mapping[str, Any]) -> NativeWeight:
        """Return the weight as its kernel takes it."""
        numbers, steps = parts["numbers"], parts["steps"]
        rows, columns = numbers.shape
        code, both = _code(self.kind == WITH_FACTORS), (numbers, steps)
        return weight_of_parts(code, both, rows=rows, columns=columns, more=[self._columns], takes_rounded=True)


@functools.cache
def _code(has_factors: bool) -> Any:
    from offload.native.bytes import bytes_module
    from offload.native.instructions import WIDE

    if has_wide_registers():
        return compiled(str(bytes_module((8, 4, 2, 1), width=WIDE, has_factors=has_factors)))
    return compiled(str(bytes_module((2, 1), has_factors=has_factors)))


@functools.cache
def _is_right(kind: str) -> bool:
    """Return whether the kernel's products are those of unpacked weights, for a row alone by bits as among others."""
    own, block = ByteLanes(kind=kind), TYPES[kind]
    shape = (2 * NUM_ROWS, 2 * block.weights)
    # No byte is above 63, so that no scale of two bytes is infinite.
    blocks = torch.arange(shape[0] * 2 * block.num_bytes).mul_(37).remainder_(61).to(torch.uint8).view(shape[0], -1)
    parts = own.parts_of(blocks)
    weight = torch.empty(shape[0] * 2, block.weights)
    block.unpack(blocks.view(-1, block.num_bytes), weight)
    return is_right(lambda rows: own.multiply(parts, rows, None), weight.view(shape), largest_error=LARGEST_ERROR)


def _kernel(stored: PackedStorage, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Kernel | None:
    """Return the product, whose rows have the same bits whatever rows stand beside them."""
    if not isinstance(stored, ByteLanes) or device.type != "cpu" or dtype not in DTYPES or len(shape) != 2:
        return None
    if not (is_available() and _is_right(stored.kind)):
        return None
    return Kernel(multiply=stored.multiply, native=stored.native)


def _repacked(stored: PackedStorage, shape: tuple[int, ...], device: torch.device | None) -> Repacked | None:
    """Return how a matrix is put in order when it is loaded for a processor; files keep their blocks."""
    if device is None or device.type != "cpu" or not isinstance(stored, PublishedWeight) or stored.name not in KINDS:
        return None
    is_matrix = set(stored.parts) == {"blocks"} and stored.num_matrices == 1 and not stored.is_transposed
    if not is_matrix or len(shape) != 2 or shape[0] % NUM_ROWS or not is_available():
        return None
    own, of_part = ByteLanes(kind=stored.name), stored.parts["blocks"].shape

    def repack(_parameter: str, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        blocks = parts["blocks"]
        if len(of_part) == HEADS_DIMENSIONS:  # a head's halves one after the other
            blocks = blocks.reshape(-1, of_part[1] // 2, 2, of_part[2]).transpose(1, 2)
        return own.parts_of(blocks.reshape(shape[0], of_part[-1]))

    return Repacked(storage=own, repack=repack)


BYTE_LANES = ByteLanes()
BYTE_LANES_LAYOUT = LosslessLayout(own=BYTE_LANES, kernel=_kernel, repacked=_repacked, detect=BYTE_LANES.detect)
