"""bitsandbytes' int8: rows of whole numbers, with one scale a row (LLM.int8(), section 2, weights only)."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.formats.packed_format import (
    BLOCK_SIZE,
    TREE_ROWS,
    WEIGHTS_AT_ONCE,
    Kernel,
    Layouts,
    Packing,
    StoredParameter,
    content_of,
    rows_at_once,
)
from offload.formats.published import weights_at_once
from offload.layouts.onednn import many_rows_dtype

LARGEST = 127  # of the whole numbers
STEP = 32  # columns that the kernel reads at once: others it would read beyond the end
CAPABILITIES = ("AVX512", "AVX2")  # of processors, as torch names them: on others its kernel is slower than unpacking


@dataclass(frozen=True, slots=True, kw_only=True)
class BitsandbytesInt8:
    """The format, which is the same for every weight: it has no settings."""

    name: str = "int8"
    methods: tuple[str, ...] = ("bitsandbytes",)
    variant: str = ""
    even_steps: None = None
    turned: None = None
    unpack_some: None = None

    def detect(self, weight: StoredParameter) -> BitsandbytesInt8 | None:
        """Find the format by its scales; it is refused where the rows were reordered for a kernel."""
        if not weight.stored.keys() >= set(self.stored_names(weight.name).values()):
            return None
        order = weight.stored.get(f"{weight.name.rpartition('.')[0]}.weight_format")
        if order is not None and any(content_of(order[0])):
            raise weight.cannot_be_used("its rows are not stored as rows")
        return self

    def part_shapes(self, shape: tuple[int, ...]) -> Layouts:
        """Return the weight's own shape, and that of one scale a row."""
        return {"packed": (shape, torch.int8), "scale": ((math.prod(shape[:-1]),), torch.float32)}

    def stored_names(self, parameter: str) -> dict[str, str]:
        """Return the names that bitsandbytes gives the parts."""
        module, _, attribute = parameter.rpartition(".")
        return {"packed": parameter, "scale": f"{module}.SCB" if attribute == "weight" else f"{parameter}.SCB"}

    def of_share(self, shape: tuple[int, ...], num_shares: int) -> BitsandbytesInt8:
        """Return the same: each row is packed by itself."""
        return self

    def for_shares(self, shape: tuple[int, ...], num_shares: int) -> BitsandbytesInt8:
        """Return the same: each row is packed by itself."""
        return self

    def states(self, parameter: str, shape: tuple[int, ...]) -> dict[str, bytes]:
        """Return nothing: the parts say everything."""
        return {}

    def keeping(self, packing: Packing, shape: tuple[int, ...]) -> None:
        """Return None: the numbers are others."""

    def packs(self, shape: tuple[int, ...]) -> bool:
        """Return whether the weight has whole blocks."""
        return math.prod(shape) % BLOCK_SIZE == 0

    def pack(self, weight: Tensor) -> tuple[BitsandbytesInt8, dict[str, Tensor]]:
        """Scale each row to [-127, 127] by its largest magnitude."""
        rows = weight.reshape(-1, weight.shape[-1])
        packed, scale = torch.empty_like(rows, dtype=torch.int8), rows.new_empty(rows.shape[0], dtype=torch.float32)
        num_rows = rows_at_once(WEIGHTS_AT_ONCE, rows.shape[1])
        for first in range(0, rows.shape[0], num_rows):
            share = rows[first : first + num_rows].float()
            largest = share.abs().amax(dim=1)
            scale[first : first + num_rows] = largest
            steps = LARGEST / largest.clamp_min(torch.finfo(torch.float32).tiny)
            packed[first : first + num_rows] = (share * steps[:, None]).round_().to(torch.int8)
        return self, {"packed": packed.view(weight.shape), "scale": scale}

    def unpack(self, parts: Mapping[str, Tensor], out: Tensor) -> Tensor:
        """Unpack some rows at a time: in float32, rounded once.

        The kernel that bitsandbytes has for this needs several passes.
        """
        columns = out.shape[-1]
        num_rows = rows_at_once(weights_at_once(out.device), columns)
        whole = (out.view(-1, columns), parts["packed"].view(-1, columns), (parts["scale"] / LARGEST)[:, None])
        for place, packed, scale in zip(*(part.split(num_rows) for part in whole), strict=True):
            torch.mul(packed, scale, out=place)
        return out

    def kernel(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Kernel | None:
        """Return torch's product of a tree's rows in bf16, whose bits do not depend on other rows.

        Above some 48 rows it is slower than unpacking, by a third at the most. Processors without bf16 multiply more
        rows in float32.
        """
        is_fast = torch.backends.cpu.get_cpu_capability() in CAPABILITIES
        if device.type != "cpu" or dtype != torch.bfloat16 or len(shape) != 2 or shape[1] % STEP or not is_fast:
            return None
        if many_rows_dtype(dtype, device) != dtype:
            return Kernel(multiply=_multiply_any_rows)
        return Kernel(max_rows=TREE_ROWS, multiply=_multiply)


def _multiply_any_rows(parts: Mapping[str, Tensor], rows: Tensor, bias: Tensor | None) -> Tensor:
    """Return rows [..., i] times a packed weight, and the bias, by what is faster for so many rows: [..., r]."""
    flat = rows.reshape(-1, rows.shape[-1])
    if len(flat) <= TREE_ROWS:
        return _multiply(parts, rows, bias)
    packed, product, wide = parts["packed"], rows.new_empty(len(flat), parts["packed"].shape[0]), flat.float()
    num_rows = rows_at_once(weights_at_once(packed.device), packed.shape[1])
    shares = zip(*(part.split(num_rows) for part in (packed, parts["scale"])), strict=True)
    for place, (share, scale) in zip(product.split(num_rows, dim=1), shares, strict=True):
        place.copy_((wide @ share.float().T).mul_(scale / LARGEST))
    return (product if bias is None else product.add_(bias)).view(*rows.shape[:-1], -1)


def _multiply(parts: Mapping[str, Tensor], rows: Tensor, bias: Tensor | None) -> Tensor:
    """Return rows [..., i] times a packed weight, and the bias: [..., r]."""
    packed = parts["packed"]
    flat = rows.reshape(-1, rows.shape[-1])
    product: Tensor = torch.ops.aten._weight_int8pack_mm(flat, packed, _ones(packed.shape[0]))
    scale = parts["scale"] / LARGEST  # in float32: the kernel takes scales in bf16
    # One number after the other, rounded once: in place, no float32 product is made and read again.
    scaled = product.mul_(scale) if bias is None else (product * scale).add_(bias).to(rows.dtype)
    return scaled.view(*rows.shape[:-1], -1)


@functools.cache
def _ones(count: int) -> Tensor:
    """Return the scales that the kernel is given, which are not the weight's."""
    return torch.ones(count, dtype=torch.bfloat16)


INT8 = BitsandbytesInt8()
