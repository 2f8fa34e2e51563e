"""bitsandbytes' 4-bit formats: blocks of weights share a scale, which often has 8 bits itself (QLoRA, section 3)."""

from __future__ import annotations

import functools
import json
import logging
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import ModuleType

import torch
from torch import Tensor

from offload.checkpoint import parse_json
from offload.formats.storage import BLOCK_SIZE, WEIGHTS_AT_ONCE, PartShapes, Quantizer, StoredParameter, content_of

STATE_KEY = "quant_state.bitsandbytes__"  # of the small JSON beside a weight; the format's name follows
BLOCK_SIZES = {32, 64, 128, 256, 512, 1024, 2048, 4096}  # bitsandbytes' own
NESTED_BLOCK_SIZE = 256  # scales that share a scale of their own
MAX_WEIGHTS_AT_ONCE = 1 << 28  # the kernels count in 32 bits
# The CPU kernel makes a new tensor: an allocator reuses small ones, and keeps hundreds of MiB of freed large ones.
MAX_WEIGHTS_AT_ONCE_ON_CPU = 1 << 20


@functools.cache
def bitsandbytes_functional() -> ModuleType:
    """Return the module bitsandbytes.functional, imported without a look at the network.

    On some processors bitsandbytes downloads a faster kernel while it is imported, if a package named `kernels` is
    installed, and warns if it is not.
    """
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    level, kernels = logger.level, sys.modules.get("kernels")
    logger.setLevel(logging.ERROR)
    sys.modules["kernels"] = None  # type: ignore[assignment]  # makes `import kernels` fail
    try:
        from bitsandbytes import functional
    finally:
        logger.setLevel(level)
        if kernels is None:
            del sys.modules["kernels"]
        else:
            sys.modules["kernels"] = kernels
    module: ModuleType = functional
    return module


@dataclass(frozen=True, slots=True, kw_only=True)
class Bitsandbytes4Bit(Quantizer):
    """The facts of one weight; `offset` is the mean that nested scales are stored without."""

    name: str  # bitsandbytes' own: of the 16 values that four bits stand for
    nested: bool
    block_size: int = BLOCK_SIZE
    offset: float = 0.0

    def detect(self, weight: StoredParameter) -> Bitsandbytes4Bit | None:
        """Find the format by its state, a few hundred bytes of JSON that must describe a weight of this shape."""
        parameter, stored = weight.name, weight.stored
        if parameter not in stored or f"{parameter}.absmax" not in stored:
            return None
        if not any(known._state_name(parameter) in stored for known in FORMATS_4BIT):
            raise weight.cannot_be_used(f"its '{STATE_KEY}' is missing")
        if self._state_name(parameter) not in stored:
            return None
        nested = f"{parameter}.nested_absmax" in stored
        state = stored[self._state_name(parameter)][0]
        if state.is_planned:
            return replace(self, nested=nested)
        return self._read_state(weight, content_of(state), nested=nested)

    def _state_name(self, parameter: str) -> str:
        return f"{parameter}.{STATE_KEY}{self.name}"

    def _read_state(self, weight: StoredParameter, content: bytes, *, nested: bool) -> Bitsandbytes4Bit:
        try:
            state = parse_json(content)
            offset = float(state["nested_offset"]) if nested else 0.0
            found = replace(self, nested=nested, block_size=int(state["blocksize"]), offset=offset)
            stored_shape = tuple(state["shape"])
            if found.block_size not in BLOCK_SIZES or math.prod(weight.shape) % found.block_size:
                raise ValueError(f"blocks of {found.block_size}")
            if not math.isfinite(offset):
                raise ValueError(f"an offset of {offset}")
            if nested and state["nested_blocksize"] != NESTED_BLOCK_SIZE:
                raise ValueError(f"nested blocks of {state['nested_blocksize']}")
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise weight.cannot_be_used(f"its quantisation state is not understood: {error}") from error
        if stored_shape != weight.shape:
            raise weight.cannot_be_used(
                f"it was packed as {list(stored_shape)}, and the module computes with {list(weight.shape)}"
            )
        return found

    def part_shapes(self, shape: tuple[int, ...]) -> PartShapes:
        """Return the parts' shapes: two weights a byte, and a scale a block.

        A scale itself has 8 bits where scales are nested.
        """
        num_weights = math.prod(shape)
        num_blocks = -(-num_weights // self.block_size)
        packed = ((-(-num_weights // 2), 1), torch.uint8)
        if not self.nested:
            return {"packed": packed, "absmax": ((num_blocks,), torch.float32)}
        return {
            "packed": packed,
            "absmax": ((num_blocks,), torch.uint8),
            "nested_absmax": ((-(-num_blocks // NESTED_BLOCK_SIZE),), torch.float32),
        }

    def stored_names(self, parameter: str) -> dict[str, str]:
        """Return the names that bitsandbytes gives the parts."""
        names = {"packed": parameter, "absmax": f"{parameter}.absmax"}
        return {**names, "nested_absmax": f"{parameter}.nested_absmax"} if self.nested else names

    def of_share(self, shape: tuple[int, ...], num_shares: int) -> Bitsandbytes4Bit | None:
        """Return the same where a share has whole blocks, and whole blocks of scales."""
        block_weights = self.block_size * (NESTED_BLOCK_SIZE if self.nested else 1)
        return None if math.prod(shape) // num_shares % block_weights else self

    def for_shares(self, shape: tuple[int, ...], num_shares: int) -> Bitsandbytes4Bit:
        """Return the format with scales in float32 where shares would have nested blocks in common.

        That takes 4.5 bits a weight where nested scales take 4.13.
        """
        if self.of_share(shape, num_shares) is not None:
            return self
        single = replace(self, nested=False)
        return self if single.of_share(shape, num_shares) is None else single

    def states(self, parameter: str, shape: tuple[int, ...]) -> dict[str, bytes]:
        """Return the JSON that bitsandbytes stores beside a weight."""
        state: dict[str, object] = {
            "quant_type": self.name,
            "blocksize": self.block_size,
            "dtype": "bfloat16",
            "shape": list(shape),
        }
        if self.nested:
            state |= {"nested_blocksize": NESTED_BLOCK_SIZE, "nested_dtype": "float32", "nested_offset": self.offset}
        return {self._state_name(parameter): json.dumps(state).encode()}

    def pack(self, weight: Tensor) -> tuple[Bitsandbytes4Bit, dict[str, Tensor]]:
        """Pack blocks in 4 bits, and their scales in 8 where they are nested."""
        functional = bitsandbytes_functional()
        blocks = weight.reshape(-1, self.block_size)
        packed, scales = [], []
        for share in blocks.split(WEIGHTS_AT_ONCE // self.block_size):
            quantized, state = functional.quantize_4bit(share, blocksize=self.block_size, quant_type=self.name)
            packed.append(quantized)
            scales.append(state.absmax)
        scale = torch.cat(scales)
        if not self.nested:
            return self, {"packed": torch.cat(packed), "absmax": scale}
        offset = scale.mean()
        nested, state = functional.quantize_blockwise(scale - offset, blocksize=NESTED_BLOCK_SIZE)
        parts = {"packed": torch.cat(packed), "absmax": nested, "nested_absmax": state.absmax}
        return replace(self, offset=float(offset)), parts

    def unpack(self, parts: Mapping[str, Tensor], out: Tensor) -> Tensor:
        """Unpack the weight through bitsandbytes' kernel, as rows of one block each.

        The kernel for CPUs miscounts blocks that straddle rows, and takes no place to write to.
        """
        functional = bitsandbytes_functional()
        block_size, scales = self.block_size, self.block_scales(parts)
        num_blocks, on_cpu = out.numel() // block_size, out.device.type == "cpu"
        blocks_at_once = (MAX_WEIGHTS_AT_ONCE_ON_CPU if on_cpu else MAX_WEIGHTS_AT_ONCE) // block_size
        packed, flat = parts["packed"].view(-1), out.view(-1)
        for first in range(0, num_blocks, blocks_at_once):
            end = min(first + blocks_at_once, num_blocks)
            state = functional.QuantState(
                absmax=scales[first:end],
                shape=torch.Size((end - first, block_size)),
                blocksize=block_size,
                quant_type=self.name,
                dtype=out.dtype,
            )
            share = packed[first * block_size // 2 : end * block_size // 2].view(-1, 1)
            place = flat[first * block_size : end * block_size].view(-1, block_size)
            if on_cpu:
                place.copy_(functional.dequantize_4bit(share, state))
            else:
                functional.dequantize_4bit(share, state, out=place)
        return out

    def block_scales(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Return the float32 scale of every block."""
        scales = parts["absmax"]
        if not self.nested:
            return scales
        functional = bitsandbytes_functional()
        state = functional.QuantState(
            absmax=parts["nested_absmax"],
            code=nested_code(scales.device),
            blocksize=NESTED_BLOCK_SIZE,
            dtype=torch.float32,
        )
        unpacked: Tensor = functional.dequantize_blockwise(scales, state)
        return unpacked.add_(self.offset)


@functools.cache
def nested_code(device: torch.device) -> Tensor:
    """Return the code that bitsandbytes has for the scales of scales, the same in every checkpoint."""
    code: Tensor = bitsandbytes_functional().create_dynamic_map().to(device)
    return code


NF4 = Bitsandbytes4Bit(name="nf4", nested=True)
FP4 = Bitsandbytes4Bit(name="fp4", nested=False)  # of published checkpoints; nf4 loses less
FORMATS_4BIT = (NF4, FP4)
