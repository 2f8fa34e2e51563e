"""GGML's blocks are unpacked on a card by one kernel a type, where its bits are those of torch's operations.

A card then moves 2.3 to 3.1 bytes a weight, where torch's operations move 19 to 45. Rows are read where they lie: in a
Llama's order of heads, or as every other row of another matrix.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor

from offload.formats.four_bits_kernel import works_on
from offload.formats.gguf_blocks import TYPES, BlockType

logger = logging.getLogger("edgespec.offload")

NAMES = (
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4",
)  # fmt: skip
WEIGHTS_AT_ONCE = 2048  # of one program
SAMPLE_BLOCKS = 301  # every byte in every place, and no multiple of what a program takes
MAX_DIMENSIONS = 4  # of blocks: a run, and three that runs are counted by
WORDS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRuns:
    """Blocks that follow each other where they are read and where their weights go, and how such runs are counted."""

    lengths: tuple[int, int, int, int]  # blocks of a run, runs of an inner dimension, of a middle and of an outer one
    sources: tuple[int, int, int]  # blocks from one to the next, of the inner, the middle and the outer
    places: tuple[int, int, int]


def runs_on(name: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a card has a kernel for this type: it is compiled and tried when that is first asked."""
    return name in NAMES and works_on(device, dtype, _trial(name), name)


def unpack_on_card(block: BlockType, blocks: Tensor, out: Tensor) -> bool:
    """Write blocks uint8 [..., bytes] as weights [..., i], rounded once, if the kernel can read them where they lie."""
    runs = runs_of(block, blocks, out)
    if runs is None:
        _say_where(block.name)
        return False
    if out.numel():
        _launch(block, blocks, out, runs)
    return True


@functools.cache
def _say_where(name: str) -> None:
    """Say once for each type that its blocks lie so that no kernel reads them."""
    logger.warning("blocks of %s do not lie at multiples of their words: torch's operations unpack them", name)


def runs_of(block: BlockType, blocks: Tensor, out: Tensor) -> BlockRuns | None:
    """Return the runs of blocks [..., bytes] whose weights go to [..., i]; None where a kernel cannot follow them."""
    strides = [
        (length, source, place)
        for length, source, place in zip(blocks.shape[:-1], blocks.stride()[:-1], out.stride()[:-1], strict=True)
        if length != 1
    ]
    is_in_blocks = all(not source % block.num_bytes and not place % block.weights for _, source, place in strides)
    if not is_in_blocks or not lie_at_words(block, blocks) or (blocks.stride(-1), out.stride(-1)) != (1, 1):
        return None
    dims = [(blocks.shape[-1] // block.num_bytes, 1, 1)]  # from the innermost on
    for length, source_bytes, place_weights in reversed(strides):
        source, place = source_bytes // block.num_bytes, place_weights // block.weights
        within, *steps = dims[-1]
        if [source, place] == [within * step for step in steps]:
            dims[-1] = (length * within, *dims[-1][1:])
        else:
            dims.append((length, source, place))
    if len(dims) > MAX_DIMENSIONS:
        return None
    (run, _, _), inner, middle, outer = dims + [(1, 0, 0)] * (MAX_DIMENSIONS - len(dims))
    lengths, sources, places = zip(inner, middle, outer, strict=True)
    return BlockRuns(lengths=(run, *lengths), sources=sources, places=places)


def _launch(block: BlockType, blocks: Tensor, out: Tensor, runs: BlockRuns) -> None:
    kernels = import_module("offload.formats.gguf_triton")
    words = blocks.view(WORDS[word_bytes(block)])
    halves = words if block.num_bytes % 2 else blocks.view(torch.float16)
    run, inners, middles, outers = runs.lengths
    at_once = WEIGHTS_AT_ONCE // block.weights
    chunks = -(-run // at_once)
    with torch.cuda.device(out.device) if out.is_cuda else nullcontext():
        kernels.unpack[(chunks * inners * middles * outers,)](
            words, halves, out, chunks, run, inners, middles, *runs.sources, *runs.places,
            read=kernels.READS[block.name],
            weights=block.weights, size=block.num_bytes, each=word_bytes(block), at_once=at_once,
        )  # fmt: skip


def word_bytes(block: BlockType) -> int:
    """Return the bytes of the largest word that all places in a block are multiples of."""
    return math.gcd(block.num_bytes, 4)


def lie_at_words(block: BlockType, blocks: Tensor) -> bool:
    """Return whether blocks begin at a multiple of their words: a kernel reads them as such."""
    return not any(start % word_bytes(block) for start in (blocks.data_ptr(), int(blocks.storage_offset())))


@functools.cache
def _trial(name: str) -> Callable[[torch.device, torch.dtype], bool]:
    return functools.partial(_is_equal, name)


def _is_equal(name: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the kernel gives the bits of torch's operations, of all bytes and scales of all sizes."""
    block = TYPES[name]
    every = torch.arange(SAMPLE_BLOCKS * block.num_bytes, device=device).mul_(37).remainder_(257).to(torch.uint8)
    blocks = every.view(SAMPLE_BLOCKS, -1)
    numbers = torch.empty(SAMPLE_BLOCKS, block.weights, device=device)
    block.unpack(blocks, numbers)
    expected = numbers.to(dtype)
    found = torch.empty_like(expected)
    _launch(block, blocks, found, BlockRuns(lengths=(SAMPLE_BLOCKS, 1, 1, 1), sources=(0, 0, 0), places=(0, 0, 0)))
    is_number = ~expected.isnan()
    same = found.view(torch.uint8).view(*found.shape, -1) == expected.view(torch.uint8).view(*found.shape, -1)
    return bool(torch.equal(found.isnan(), ~is_number) and same.all(-1)[is_number].all())
