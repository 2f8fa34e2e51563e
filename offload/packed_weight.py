"""Quantised weights, packed as bitsandbytes packs them, and unpacked where a module computes.

A module keeps its own forward: its quantised parameters are unpacked into scratch memory just
before it runs, and let go after. So linear layers, GPT-2's transposed ones and fused experts are
all the same, and the packed bytes and scales are parameters like any other, which stream. Each
row of a result depends on that row alone (activations are not quantised), as a tree needs.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from offload.kernels import bitsandbytes_functional

MAX_WEIGHTS_AT_ONCE = 1 << 28  # the kernels count in 32 bits
# The CPU kernel makes a new tensor: an allocator reuses small ones, and keeps hundreds of MiB of freed large ones.
MAX_WEIGHTS_AT_ONCE_ON_CPU = 1 << 20
BLOCK_SIZE = 64  # weights that share a scale, in 4-bit formats
NESTED_BLOCK_SIZE = 256  # scales that share a scale of their own
FORMATS_4BIT = ("nf4", "fp4")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedFormat:
    """How a weight is packed; offset is the mean that nested scales are stored without."""

    kind: str  # int8 | nf4 | fp4
    nested: bool = False
    block_size: int = BLOCK_SIZE
    offset: float = 0.0

    def part_shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The packed parts of a weight of this shape: part -> (shape, dtype)."""
        if self.kind == "int8":
            return {
                "packed": (shape, torch.int8),
                "scale": ((math.prod(shape[:-1]),), torch.float32),  # one a row
            }
        num_weights = math.prod(shape)
        num_blocks = -(-num_weights // self.block_size)
        packed = ((-(-num_weights // 2), 1), torch.uint8)
        if not self.nested:
            return {"packed": packed, "absmax": ((num_blocks,), torch.float32)}
        nested_shape = (-(-num_blocks // NESTED_BLOCK_SIZE),)
        return {
            "packed": packed,
            "absmax": ((num_blocks,), torch.uint8),
            "nested_absmax": (nested_shape, torch.float32),
        }

    def stored_names(self, name: str) -> dict[str, str]:
        """Part -> its name in a checkpoint, for the parameter `name`: bitsandbytes' own names."""
        if self.kind == "int8":
            owner, _, attribute = name.rpartition(".")
            return {"packed": name, "scale": f"{owner}.SCB" if attribute == "weight" else f"{name}.SCB"}
        names = {"packed": name, "absmax": f"{name}.absmax"}
        return {**names, "nested_absmax": f"{name}.nested_absmax"} if self.nested else names


class PackedWeight(nn.Module):
    """One weight's packed parts, as parameters."""

    def __init__(self, shape: tuple[int, ...], packing: PackedFormat) -> None:
        super().__init__()
        self.shape = shape
        self.packing = packing
        for part, (part_shape, dtype) in packing.part_shapes(shape).items():
            empty = torch.empty(part_shape, dtype=dtype, device="meta")
            self.register_parameter(part, nn.Parameter(empty, requires_grad=False))

    def unpack(self, out: Tensor) -> Tensor:
        """The weight, written to `out`."""
        parts: Any = self._parameters
        if self.packing.kind == "int8":
            # int8 is exact in every compute dtype; one pass over memory, which bitsandbytes' own
            # kernel needs several for.
            out.copy_(parts["packed"])
            out.view(-1, self.shape[-1]).mul_((parts["scale"] / 127)[:, None])  # in float32, rounded once
            return out
        return unpack_4bit(parts, self.packing, out)


def unpack_4bit(parts: dict[str, Tensor], packing: PackedFormat, out: Tensor) -> Tensor:
    """A 4-bit weight through bitsandbytes' kernel, as rows of one block each.

    Its CPU kernel miscounts blocks that straddle rows, and takes no place to write to.
    """
    functional = bitsandbytes_functional()
    block_size, scales = packing.block_size, _block_scales(parts, packing)
    num_blocks, on_cpu = out.numel() // block_size, out.device.type == "cpu"
    blocks_at_once = (MAX_WEIGHTS_AT_ONCE_ON_CPU if on_cpu else MAX_WEIGHTS_AT_ONCE) // block_size
    packed, flat = parts["packed"].view(-1), out.view(-1)
    for first in range(0, num_blocks, blocks_at_once):
        end = min(first + blocks_at_once, num_blocks)
        state = functional.QuantState(
            absmax=scales[first:end],
            shape=torch.Size((end - first, block_size)),
            blocksize=block_size,
            quant_type=packing.kind,
            dtype=out.dtype,
        )
        share = packed[first * block_size // 2 : end * block_size // 2].view(-1, 1)
        place = flat[first * block_size : end * block_size].view(-1, block_size)
        if on_cpu:
            place.copy_(functional.dequantize_4bit(share, state))
        else:
            functional.dequantize_4bit(share, state, out=place)
    return out


def _block_scales(parts: dict[str, Tensor], packing: PackedFormat) -> Tensor:
    """The float32 scale of every block."""
    scales = parts["absmax"]
    if not packing.nested:
        return scales
    functional = bitsandbytes_functional()
    state = functional.QuantState(
        absmax=parts["nested_absmax"],
        code=_nested_code(scales.device),
        blocksize=NESTED_BLOCK_SIZE,
        dtype=torch.float32,
    )
    unpacked: Tensor = functional.dequantize_blockwise(scales, state)
    return unpacked.add_(packing.offset)


@functools.cache
def _nested_code(device: torch.device) -> Tensor:
    """Bitsandbytes' code for the scales of scales, the same in every checkpoint."""
    code: Tensor = bitsandbytes_functional().create_dynamic_map().to(device)
    return code


class PackedModule:
    """A module whose parameters `weights` are packed: (attribute, its packed form)."""

    def __init__(self, module: nn.Module, weights: list[tuple[str, PackedWeight]]) -> None:
        self.module = module
        self.weights = weights

    def num_unpacked(self) -> int:
        """Weights that are unpacked at once."""
        return sum(math.prod(packed.shape) for _, packed in self.weights)

    def hook(self, scratch: Tensor) -> list[RemovableHandle]:
        """Unpack into `scratch` around every forward."""
        places, start = [], 0
        for attribute, packed in self.weights:
            end = start + math.prod(packed.shape)
            places.append((attribute, packed, scratch[start:end].view(packed.shape)))
            start = end
        parameters = self.module._parameters
        on_meta = {attribute: parameters[attribute] for attribute, _ in self.weights}

        def unpack(_module: nn.Module, _arguments: Any) -> None:
            for attribute, packed, place in places:
                parameters[attribute] = nn.Parameter(packed.unpack(place), requires_grad=False)

        def let_go(_module: nn.Module, _arguments: Any, _output: Any) -> None:
            parameters.update(on_meta)

        return [
            self.module.register_forward_pre_hook(unpack),
            self.module.register_forward_hook(let_go, always_call=True),
        ]
