"""Products with bitsandbytes' weights as they are stored: of four bits on a card, of eight on a CPU."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from offload.formats.bitsandbytes_4bit import NF4, Bitsandbytes4Bit, bitsandbytes_functional, nested_code
from offload.formats.bitsandbytes_int8 import INT8, LARGEST, BitsandbytesInt8
from offload.formats.published import weights_at_once
from offload.formats.storage import PackedStorage, rows_at_once
from offload.layouts.layout import TREE_ROWS, ComputeLayout, Kernel, are_few, in_pieces, is_right
from offload.layouts.onednn import has_onednn, many_rows_dtype
from offload.native.compiler import compiled, is_available
from offload.native.weights import NativeWeight, float_tiles, weight_of_parts

FEW_ROWS = 4  # bitsandbytes multiplies these with the packed weight itself on every card, faster than unpacked
MOST_ROWS = 1536  # more it unpacks weights for on every card
STEP = 32  # columns that a CPU's kernel reads at once: others it would read beyond the end
ALIGNED_BYTES = 16  # where numbers begin at no such multiple, as in files, the kernel for AVX-512 ends the process
UNIT = 32  # rows and columns that our kernel needs a multiple of
SAMPLE_SHAPE, LARGEST_ERROR = (64, 160), 1e-5  # of a product, beside its norm
CAPABILITIES = ("AVX512", "AVX2")  # of processors, as torch names them: on others its kernel is slower than unpacking


def _kernel_4bit(
    stored: PackedStorage, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Kernel | None:
    """Return bitsandbytes' product on a card; no block may straddle the rows of the weight."""
    if not isinstance(stored, Bitsandbytes4Bit) or device.type != "cuda":
        return None
    if len(shape) != 2 or shape[1] % stored.block_size:
        return None
    block_size, name, offset = stored.block_size, stored.name, stored.offset

    def multiply(parts: Mapping[str, Tensor | None], rows: Tensor, bias: Tensor | None) -> Tensor:
        bitsandbytes_functional()  # its operations are known from then on
        scales, nested = parts["absmax"], parts.get("nested_absmax")
        of_nested: tuple[Any, ...] = (None, None, None)
        if nested is not None:
            of_nested = scales, nested_code(rows.device), _number(offset, rows.device)
            scales = nested
        packed = parts["packed"]
        product: Tensor = torch.ops.bitsandbytes.gemm_4bit(
            rows, packed, shape, scales, block_size, name, bias, *of_nested
        )
        return product

    return Kernel(max_rows=most_rows(device, dtype, shape), multiply=multiply)


@functools.cache
def most_rows(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Return how many rows are multiplied with a packed weight (m, k) as it is: by bitsandbytes' own rule for the card.

    The rule is a private function of the library, measured on each generation. Where it cannot be called, it is 4 rows.
    """
    try:
        bitsandbytes_functional()
        rule = importlib.import_module("bitsandbytes.backends.cuda.ops")._gemm_4bit_use_custom_fn
        index = torch.cuda.current_device() if device.index is None else device.index
        unpacked = next((rows for rows in range(1, MOST_ROWS + 1) if not rule(index, dtype, rows, *shape)), None)
    except Exception:  # another release, or a device that is only planned for
        return FEW_ROWS
    return MOST_ROWS if unpacked is None else max(1, unpacked - 1)


@functools.cache
def _number(number: float, device: torch.device) -> Tensor:
    return torch.tensor(number, dtype=torch.float32, device=device)


def _kernel_int8(
    stored: PackedStorage, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Kernel | None:
    """Return the product of a tree's rows, whose bits do not depend on other rows: ours, or torch's in bf16.

    Above some 48 rows torch's is slower than unpacking, by a third at the most. Processors without bf16 multiply more
    rows in float32.
    """
    if not isinstance(stored, BitsandbytesInt8) or device.type != "cpu" or len(shape) != 2:
        return None
    is_whole = not (shape[0] % UNIT or shape[1] % UNIT)
    if is_whole and dtype in {torch.bfloat16, torch.float32} and is_available() and _is_right():
        is_unpacked_for_many = dtype == torch.bfloat16 and has_onednn(dtype)
        return Kernel(
            multiply=_multiply_natively,
            max_rows=TREE_ROWS if is_unpacked_for_many else sys.maxsize,
            native=native_int8,
        )
    if dtype != torch.bfloat16 or shape[1] % STEP or torch.backends.cpu.get_cpu_capability() not in CAPABILITIES:
        return None
    if many_rows_dtype(dtype, device) != dtype:
        return Kernel(multiply=_multiply_any_rows)
    return Kernel(max_rows=TREE_ROWS, multiply=_multiply_int8)


def native_int8(parts: Mapping[str, Any]) -> NativeWeight:
    """Return a weight [r, i] as our kernel takes it, for rows of float32."""
    both = [parts["packed"].detach(), parts["scale"].detach() / LARGEST]
    rows, columns = both[0].shape
    return weight_of_parts(_code(), both, rows=rows, columns=columns, more=[1, columns, 1], takes_rounded=False)


def _multiply_natively(parts: Mapping[str, Tensor], rows: Tensor, bias: Tensor | None) -> Tensor:
    found = native_int8(parts).product(rows.float()).to(rows.dtype)
    return found if bias is None else found.add_(bias)


@functools.cache
def _code() -> Any:
    from offload.native.float8 import float8_module

    return compiled(str(float8_module(float_tiles(), are_whole=True)))


@functools.cache
def _is_right() -> bool:
    """Return whether our products are those of unpacked weights, for a row alone by bits as among others."""
    rows, columns = SAMPLE_SHAPE
    packed = torch.arange(rows * columns).mul_(7).remainder_(253).sub_(126).to(torch.int8).view(SAMPLE_SHAPE)
    parts = {"packed": packed, "scale": torch.linspace(0.5, 1.5, rows)}
    weight = INT8.unpack(parts, torch.empty(SAMPLE_SHAPE))
    return is_right(native_int8(parts).product, weight, largest_error=LARGEST_ERROR)


def _multiply_any_rows(parts: Mapping[str, Tensor], rows: Tensor, bias: Tensor | None) -> Tensor:
    """Return rows [..., i] times a packed weight, and the bias, by what is faster for so many rows: [..., r]."""
    flat = rows.reshape(-1, rows.shape[-1])
    if are_few(len(flat), TREE_ROWS):
        found = in_pieces(lambda some: _multiply_int8(parts, some, bias), flat, TREE_ROWS)
        return found.view(*rows.shape[:-1], -1)
    packed, product, wide = parts["packed"], rows.new_empty(len(flat), parts["packed"].shape[0]), flat.float()
    num_rows = rows_at_once(weights_at_once(packed.device), packed.shape[1])
    shares = zip(*(part.split(num_rows) for part in (packed, parts["scale"])), strict=True)
    for place, (share, scale) in zip(product.split(num_rows, dim=1), shares, strict=True):
        place.copy_((wide @ share.float().T).mul_(scale / LARGEST))
    return (product if bias is None else product.add_(bias)).view(*rows.shape[:-1], -1)


def _multiply_int8(parts: Mapping[str, Tensor], rows: Tensor, bias: Tensor | None) -> Tensor:
    """Return rows [..., i] times a packed weight, and the bias: [..., r]."""
    packed = parts["packed"]
    flat = rows.reshape(-1, rows.shape[-1])
    if packed.data_ptr() % ALIGNED_BYTES:
        shares = packed.split(rows_at_once(weights_at_once(packed.device), packed.shape[1]))
        product = torch.cat([_product_int8(flat, share.clone()) for share in shares], dim=-1)
    else:
        product = _product_int8(flat, packed)
    scale = parts["scale"] / LARGEST  # in float32: the kernel takes scales in bf16
    # One number after the other, rounded once: in place, no float32 product is made and read again.
    scaled = product.mul_(scale) if bias is None else (product * scale).add_(bias).to(rows.dtype)
    return scaled.view(*rows.shape[:-1], -1)


def _product_int8(rows: Tensor, packed: Tensor) -> Tensor:
    """Return rows [n, i] times whole numbers [r, i]."""
    product: Tensor = torch.ops.aten._weight_int8pack_mm(rows, packed, _ones(packed.shape[0]))
    return product


@functools.cache
def _ones(count: int) -> Tensor:
    """Return the scales that the kernel is given, which are not the weight's."""
    return torch.ones(count, dtype=torch.bfloat16)


BITSANDBYTES_4BIT = ComputeLayout(own=NF4, kernel=_kernel_4bit)
BITSANDBYTES_INT8 = ComputeLayout(own=INT8, kernel=_kernel_int8)
