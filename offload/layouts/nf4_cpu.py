"""bitsandbytes' numbers of four bits in the order of its CPU kernel, in which they are multiplied as they are packed.

`quant=nf4-cpu` rounds weights to nf4; published nf4 and fp4 weights are repacked, with scales in bf16, and so are those
of MXFP4 and NVFP4, which only our kernels know.
Kernels are ours (`table_kernels.py`), or bitsandbytes' for processors with AVX512-BF16, where ours do not serve.
On others the weights are unpacked, as those of all formats.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from offload.formats.bitsandbytes_4bit import BLOCK_SIZES as PUBLISHED_SIZES
from offload.formats.bitsandbytes_4bit import Bitsandbytes4Bit, bitsandbytes_functional
from offload.formats.gguf_bits import FP4_NUMBERS
from offload.formats.storage import (
    BLOCK_SIZE,
    WEIGHTS_AT_ONCE,
    PackedStorage,
    PartShapes,
    Quantizer,
    StoredParameter,
    rows_at_once,
)
from offload.layouts import table_kernels
from offload.layouts.layout import Kernel, LosslessLayout, Repacked, are_few, in_pieces
from offload.layouts.onednn import in_few_sizes
from offload.layouts.rounding import least_loss, rounded_in_shares
from offload.layouts.table_kernels import E2M1, values
from offload.native.weights import NativeWeight

BLOCK_SIZES = {16, *PUBLISHED_SIZES}  # columns that share a scale: the kernel takes fewer than bitsandbytes packs
NUM_ROWS = 32  # of a block of rows: a byte has the numbers of rows j and j + 16, two columns after each other
ORDER = "halves32_pairs"
KINDS = ("nf4", "fp4", E2M1)  # the names of the 16 values that a number stands for, bitsandbytes' first
SHRINKS = (1.0, 0.95, 0.9)  # of a block's largest weight: it is clipped where that loses less
NUM_SHARES = 4096  # of the range of a block, each with one number
FEW_ROWS = 192  # measured: more rows are multiplied sooner with unpacked weights
MANY_WEIGHTS = 1 << 22  # that are unpacked for one product
KNOWN_VERSION = "0.50."  # of bitsandbytes: the arguments of its functions in C may change


def in_order(numbers: Tensor) -> Tensor:
    """Return numbers [..., r, i] in the kernel's order, two a byte: uint8 [..., r, i / 2]."""
    pairs = numbers.unflatten(-1, (-1, 2)).unflatten(-3, (-1, NUM_ROWS))  # [..., r / 32, 32, i / 2, 2]
    low, high = pairs.transpose(-3, -2).chunk(2, dim=-2)
    packed: Tensor = low | high << 4
    return packed.reshape(*numbers.shape[:-1], -1)


def in_rows(packed: Tensor) -> Tensor:
    """Return bytes in bitsandbytes' own order, row by row: uint8 [r, i / 2] in the kernel's -> uint8 [r, i / 2]."""
    rows, num_bytes = packed.shape
    pairs = packed.view(-1, num_bytes, NUM_ROWS // 2, 2).permute(3, 0, 2, 1)
    first, second = pairs.contiguous()  # columns' numbers of rows j and j + 16: [r / 32, 16, i / 2] each
    upper, lower = first << 4 | second & 15, first & 240 | second >> 4
    return torch.stack((upper, lower), dim=1).view(rows, num_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Nf4Cpu(Quantizer):
    """The facts of one weight."""

    name: str = "nf4-cpu"
    kind: str = "nf4"
    block_size: int = BLOCK_SIZE  # columns that share a scale

    @property
    def variant(self) -> str:
        """What packed weights differ in from one machine to another: whether MXFP4's are put in this order."""
        return E2M1 if table_kernels.serves(E2M1, NUM_ROWS, torch.bfloat16) else ""

    def detect(self, weight: StoredParameter) -> Nf4Cpu | None:
        """Find the format by its numbers, whose name says their kind and order."""
        kind = next((kind for kind in KINDS if f"{weight.name}.{kind}_{ORDER}" in weight.stored), None)
        if kind is None:
            return None
        scales = weight.stored.get(f"{weight.name}.{kind}_scales")
        found = replace(self, kind=kind, block_size=weight.shape[-1] // scales[0].shape[-2] if scales else 0)
        if found.block_size not in BLOCK_SIZES or not found.packs(weight.shape):
            raise weight.cannot_be_used(f"its shape {list(weight.shape)} does not belong to its scales")
        return found

    def packs(self, shape: tuple[int, ...]) -> bool:
        """Return whether a weight of this shape can be packed: whole blocks of rows, whole blocks of columns."""
        return shape[-2] % NUM_ROWS == 0 and shape[-1] % self.block_size == 0

    def part_shapes(self, shape: tuple[int, ...]) -> PartShapes:
        """Return the numbers, two a byte, and a scale for each block of columns of each row."""
        *experts, rows, columns = shape
        return {
            "numbers": ((*experts, rows, columns // 2), torch.uint8),
            "scales": ((*experts, columns // self.block_size, rows), torch.bfloat16),
        }

    def stored_names(self, parameter: str) -> dict[str, str]:
        """Return the names of the parts."""
        return {"numbers": f"{parameter}.{self.kind}_{ORDER}", "scales": f"{parameter}.{self.kind}_scales"}

    def pack(self, weight: Tensor) -> tuple[Nf4Cpu, dict[str, Tensor]]:
        """Round blocks of columns to the values that bitsandbytes gives numbers.

        Of several scales the one with the least squared error is taken.
        """
        numbers, scales = rounded_in_shares(weight, self._nearest)
        return self, self.parts_of(numbers, scales)

    def parts_of(self, numbers: Tensor, scales: Tensor) -> dict[str, Tensor]:
        """Return the parts of numbers [..., r, i] with a scale for each block [..., r, B]."""
        return {"numbers": in_order(numbers), "scales": scales.mT.to(torch.bfloat16).contiguous()}

    def _nearest(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return numbers and scales of weights [r, i]: of those that SHRINKS gives a block, the nearest."""
        blocks = weight.float().unflatten(-1, (-1, self.block_size))  # [r, B, b]
        of_kind, nearest = values(self.kind, weight.device), _nearest_numbers(self.kind, weight.device)
        largest = blocks.abs().amax(-1, keepdim=True)

        def tries() -> Iterator[tuple[Tensor, ...]]:
            for shrink in SHRINKS:
                # As it is stored, so that numbers are chosen for it
                scales = (largest * shrink).to(torch.bfloat16).float()
                shares = (blocks / scales).nan_to_num_().clamp_(-1, 1)  # 0 / 0 in a block of zeros, inf / inf
                numbers = nearest.index_select(0, shares.add_(1).mul_(NUM_SHARES / 2).int().view(-1)).view_as(blocks)
                rounded = of_kind.index_select(0, numbers.view(-1)).view_as(blocks) * scales
                yield rounded.sub_(blocks).square_().sum(-1, keepdim=True), numbers, scales

        numbers, scales = least_loss(tries())
        return numbers.flatten(-2).to(torch.uint8), scales.squeeze(-1)

    def unpack(self, parts: Mapping[str, Tensor], out: Tensor) -> Tensor:
        """Bring some blocks of rows at a time into bitsandbytes' own order, and unpack them as its weights are."""
        rows, columns = out.shape[-2:]
        numbers = parts["numbers"].view(-1, rows, columns // 2)
        scales = parts["scales"].view(-1, columns // self.block_size, rows)
        if self.kind == E2M1:
            for place, packed, scale in zip(out.view(-1, rows, columns), numbers, scales, strict=True):
                self._unpack_few_values(packed, scale, place)
            return out
        is_published = self.block_size in PUBLISHED_SIZES
        by_rows = Bitsandbytes4Bit(
            name=self.kind, nested=False, block_size=self.block_size if is_published else NUM_ROWS
        )
        num_rows = rows_at_once(WEIGHTS_AT_ONCE, columns, step=NUM_ROWS)
        for matrix, place in enumerate(out.view(-1, rows, columns)):
            for first in range(0, rows, num_rows):
                share = slice(first, first + num_rows)
                packed, scale = in_rows(numbers[matrix, share]), scales[matrix, :, share].mT.float()
                absmax = scale.reshape(-1) if is_published else scale.new_ones(packed.numel() * 2 // by_rows.block_size)
                by_rows.unpack({"packed": packed, "absmax": absmax}, place[share])
                if not is_published:
                    place[share].unflatten(-1, (-1, self.block_size)).mul_(scale[..., None])
        return out

    def _unpack_few_values(self, numbers: Tensor, scales: Tensor, out: Tensor) -> None:
        """Write a matrix, block of rows after block, in float32 first: each weight is rounded once."""
        of_kind = values(self.kind, numbers.device)
        for place, packed, scale in zip(
            out.split(NUM_ROWS), numbers.split(NUM_ROWS), scales.split(NUM_ROWS, -1), strict=True
        ):
            pairs = packed.view(-1, NUM_ROWS // 2, 2).transpose(0, 1)  # [16, i / 2, 2]
            found = of_kind[torch.cat((pairs & 15, pairs >> 4)).int()].view(NUM_ROWS, -1, self.block_size)
            place.copy_(found.mul_(scale.T[:, :, None]).flatten(1))

    def has_own_kernel(self, columns: int, dtype: torch.dtype) -> bool:
        """Return whether rows of so many columns are multiplied by a kernel of ours, any number of them."""
        return columns % table_kernels.COLUMNS == 0 and table_kernels.serves(self.kind, self.block_size, dtype)

    def multiply(self, parts: Mapping[str, Tensor], rows: Tensor, bias: Tensor | None) -> Tensor:
        """Return rows [..., i] times the weight, and the bias: few rows with the numbers as they are packed."""
        flat = rows.reshape(-1, rows.shape[-1])
        if self.has_own_kernel(rows.shape[-1], rows.dtype):
            product = self.multiply_packed(parts, rows)
        elif len(flat) and are_few(len(flat), FEW_ROWS):  # bitsandbytes' kernel divides by the number of rows
            found = in_pieces(functools.partial(self.multiply_packed, parts), flat, FEW_ROWS)
            product = found.view(*rows.shape[:-1], -1)
        else:
            product = self.multiply_unpacked(parts, rows)
        return product if bias is None else product.add_(bias)

    def multiply_packed(self, parts: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        """Return rows [..., i] times the weight: [..., r]."""
        if not self.has_own_kernel(rows.shape[-1], rows.dtype):
            return self.multiply_by_library(parts, rows)
        return self.native(parts).product(rows)

    def native(self, parts: Mapping[str, Any]) -> NativeWeight:
        """Return the weight as our own kernel takes it."""
        return table_kernels.native_table(self.kind, self.block_size, parts)

    def multiply_by_library(self, parts: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        """Return the same by bitsandbytes' kernel, of bf16 rows."""
        numbers, scales, rows = parts["numbers"], parts["scales"], rows.contiguous()
        columns, num_outputs = rows.shape[-1], numbers.shape[0]
        multiply = _c_function(self.kind)
        assert rows.dtype == torch.bfloat16, f"rows are {rows.dtype}"
        if multiply is None:
            of_kind = values(self.kind, rows.device)
            found: Tensor = torch.ops.bitsandbytes.gemv_4bit.default(
                rows, numbers, (num_outputs, columns), scales, of_kind, self.block_size
            )
            return found
        product = rows.new_empty(*rows.shape[:-1], num_outputs)
        multiply(
            rows.numel() // columns, num_outputs, columns,
            rows.data_ptr(), numbers.data_ptr(), scales.data_ptr(), product.data_ptr(),
            self.block_size, columns, num_outputs,
        )  # fmt: skip
        return product

    def multiply_unpacked(self, parts: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        """Return the same by weights that are unpacked: faster for many rows."""
        num_rows = rows_at_once(MANY_WEIGHTS, rows.shape[-1], step=NUM_ROWS)
        flat, products = rows.reshape(-1, rows.shape[-1]), []
        padded = in_few_sizes(flat)
        for numbers, scales in zip(parts["numbers"].split(num_rows), parts["scales"].split(num_rows, -1), strict=True):
            weight = rows.new_empty(len(numbers), rows.shape[-1])
            product = functional.linear(padded, self.unpack({"numbers": numbers, "scales": scales}, weight))
            products.append(product[: len(flat)])
        return torch.cat(products, dim=-1).view(*rows.shape[:-1], len(parts["numbers"]))


@functools.cache
def _c_function(kind: str) -> Callable[..., None] | None:
    """Return bitsandbytes' own function for bf16 rows and this kind; None where its arguments are not known.

    A call takes 4 us, and one of torch's operator around it 15 us, as much as the product with a small weight.
    """
    library = bitsandbytes_functional().lib
    if not version("bitsandbytes").startswith(KNOWN_VERSION):
        return None
    sizes, places = [ctypes.c_int64] * 3, [ctypes.c_void_p] * 4
    prototype = ctypes.CFUNCTYPE(None, *sizes, *places, *sizes)
    return ctypes.cast(getattr(library, f"gemv_4bit_inference_cpu_{kind}_bf16"), prototype)


@functools.cache
def kernel_is_there() -> bool:
    """Return whether bitsandbytes multiplies weights in this order, which it keeps to itself, on this processor."""
    numbers = torch.arange(NUM_ROWS * 2 * BLOCK_SIZE, dtype=torch.int32).view(NUM_ROWS, -1)
    numbers = ((numbers * 7 + numbers // 16) % 16).to(torch.uint8)
    packing, scales = Nf4Cpu(), torch.arange(1, 2 * NUM_ROWS + 1).view(NUM_ROWS, 2) / 64
    rows = torch.arange(-BLOCK_SIZE, BLOCK_SIZE).bfloat16().view(1, -1) / 64
    try:
        if not bitsandbytes_functional().has_avx512bf16():
            return False
        parts = packing.parts_of(numbers, scales)
        product = packing.multiply_by_library(parts, rows).float()
    except (AttributeError, ImportError, RuntimeError, TypeError):
        return False
    weight = values(packing.kind, rows.device)[numbers.int()] * scales.repeat_interleave(BLOCK_SIZE, dim=-1)
    return torch.allclose(product, rows.float() @ weight.mT, rtol=0.02, atol=0.02)


@functools.cache
def _nearest_numbers(kind: str, device: torch.device) -> Tensor:
    """Return the number of the nearest value for shares of a scale, -1 to 1 in NUM_SHARES steps: int32.

    A look at this table takes a tenth of the time of a search among the values' borders.
    """
    in_turn, order = values(kind, device).sort()
    shares = (torch.arange(NUM_SHARES + 1, device=device) + 0.5) / (NUM_SHARES / 2) - 1
    return order[torch.bucketize(shares, (in_turn[1:] + in_turn[:-1]) / 2)].int()


def _kernel(stored: PackedStorage, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Kernel | None:
    """Return the product, whose rows have the same bits whatever rows stand beside them: our own, or bitsandbytes'.

    Many rows are multiplied by bitsandbytes' with unpacked weights, of some rows at a time.
    """
    if not isinstance(stored, Nf4Cpu) or device.type != "cpu" or len(shape) != 2:
        return None
    if stored.has_own_kernel(shape[1], dtype):
        return Kernel(multiply=stored.multiply, native=stored.native)
    return Kernel(multiply=stored.multiply) if dtype == torch.bfloat16 and kernel_is_there() else None


def _repacked(stored: PackedStorage, shape: tuple[int, ...], device: torch.device | None) -> Repacked | None:
    """Return how files keep the numbers of a weight of bitsandbytes, where no block straddles rows, or of E2M1."""
    if device is not None or not isinstance(stored, Bitsandbytes4Bit):
        return None if device is not None else _repacked_e2m1(stored, shape)
    own = Nf4Cpu(kind=stored.name, block_size=stored.block_size)
    if not own.packs(shape):
        return None

    def repack(_parameter: str, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        packed = parts["packed"].view(*shape[:-1], -1)
        numbers = torch.stack((packed >> 4, packed & 15), dim=-1).flatten(-2)
        return own.parts_of(numbers, stored.block_scales(parts).view(*shape[:-1], -1))

    return Repacked(storage=own, repack=repack)


def _repacked_e2m1(stored: PackedStorage, shape: tuple[int, ...]) -> Repacked | None:
    """Return how files keep numbers that E2M1 has, for our kernel. Experts' are made one by one: they take memory."""
    steps = stored.even_steps
    if steps is None or not steps.in_order or steps.numbers is None or not {*steps.numbers} <= {*FP4_NUMBERS}:
        return None
    block_size, rest = divmod(shape[-1], steps.num_groups)
    own, num_experts, least = Nf4Cpu(kind=E2M1, block_size=block_size), math.prod(shape[:-2]), min(steps.numbers)
    is_whole = not rest and block_size in BLOCK_SIZES and own.packs(shape)
    if not is_whole or not own.has_own_kernel(shape[-1], torch.bfloat16):
        return None
    codes = torch.tensor([FP4_NUMBERS.index(number) if number in steps.numbers else 0 for number in range(least, 13)])

    def repack(_parameter: str, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        made: list[dict[str, Tensor]] = []
        for expert in range(num_experts):
            share = {
                name: part if num_experts == 1 else part.chunk(num_experts)[expert] for name, part in parts.items()
            }
            found = steps.read(share)
            numbers = codes.to(torch.uint8)[found.numbers.int()].view(shape[-2:])
            made.append(own.parts_of(numbers, found.scale.reshape(shape[-2], -1)))
        return {
            name: torch.cat([one[name] for one in made]).view(*shape[:-2], *made[0][name].shape) for name in made[0]
        }

    return Repacked(storage=own, repack=repack)


NF4_CPU = Nf4Cpu()
NF4_CPU_LAYOUT = LosslessLayout(own=NF4_CPU, kernel=_kernel, repacked=_repacked, detect=NF4_CPU.detect)
