"""GGML's blocks are unpacked on a CPU by code that is compiled for it, where its numbers are those of torch's way."""

import functools
from typing import Any

import torch
from torch import Tensor

from offload.formats.gguf_blocks import TYPES, BlockType
from offload.native.compiler import compiled, is_available

NAMES = tuple(name for name in TYPES if name not in {"F32", "F16", "BF16"})
DTYPES = (torch.float32, torch.bfloat16)
SAMPLE_BLOCKS = 64
WORD_BYTES = 4  # torch reads none elsewhere than at their multiples


def is_native(name: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether compiled code unpacks this type to a dtype, without temporaries."""
    return device.type == "cpu" and name in NAMES and dtype in DTYPES and _code(name, dtype) is not None


def unpack_blocks(block: BlockType, blocks: Tensor, out: Tensor) -> None:
    """Write blocks uint8 [n, bytes] as weights [n, weights], rounded once."""
    if is_native(block.name, out.device, out.dtype) and out.is_contiguous():
        _unpack(_code(block.name, out.dtype), blocks.contiguous(), out)
        return
    if blocks.storage_offset() % WORD_BYTES:
        blocks = blocks.clone()
    numbers = out if out.dtype == torch.float32 else torch.empty(out.shape, device=out.device)
    block.unpack(blocks, numbers)
    if numbers is not out:
        out.copy_(numbers)


def _unpack(code: Any, blocks: Tensor, out: Tensor) -> None:
    from offload.native.unpacking import unpack

    unpack(code, blocks, len(blocks), out)


@functools.cache
def _code(name: str, dtype: torch.dtype) -> Any:
    """Return the code for a type; None where it gives other numbers, of a sample, than torch's operations."""
    if not is_available():
        return None
    from offload.native.unpacking import unpacking_module

    code, block = compiled(str(unpacking_module(name, in_half=dtype == torch.bfloat16))), TYPES[name]
    blocks = torch.arange(SAMPLE_BLOCKS * block.num_bytes).mul_(37).remainder_(251).to(torch.uint8)
    blocks = blocks.view(SAMPLE_BLOCKS, -1)
    expected = torch.empty(SAMPLE_BLOCKS, block.weights)
    block.unpack(blocks, expected)
    found = torch.empty_like(expected, dtype=dtype)
    _unpack(code, blocks, found)
    is_right = torch.equal(found.nan_to_num(), expected.to(dtype).nan_to_num())
    return code if is_right else None
