"""Few rows are multiplied with GGML's blocks on a card as they lie, by one kernel of Triton: nothing is unpacked.

A card then reads 0.5 to 1.1 bytes a weight. The kernel is used where its products are those of unpacked weights, for a
row alone by bits as among others, and up to as many rows as it is faster for.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn.functional import linear

from offload.formats.four_bits_kernel import works_on
from offload.formats.gguf_blocks import TYPES
from offload.formats.gguf_kernel import NAMES, WORDS, lie_at_words, runs_on, unpack_on_card, word_bytes
from offload.layouts.layout import fastest_s

logger = logging.getLogger("edgespec.offload")

TILE_ROWS, TILE = 16, 16  # rows, and rows of the weight, of one program: of any number of rows
COLUMNS_AT_ONCE = 256
SCALED_COLUMNS = {"Q2_K": 16, "Q3_K": 16, "Q6_K": 16}  # that share a scale; 32 of other types
FEW_ROWS = (64, 16)  # far from each other, so that two starts on one card choose the same
TIMED_SHAPE = (4096, 4096)
SAMPLE_ROWS, SAMPLE_SHAPE = 64, (40, 800)  # no multiple of what a program takes; of K blocks three
SAMPLE_BLOCKS, SAMPLE_PRIME = 2048, 65521  # of all bytes and scales, of which some are taken
ALONE = (0, 21, 63)  # rows at several places in a tile
LARGEST_ERROR = 2**-18  # of a sum in float32, beside the sum of sizes


def few_rows(name: str, device: torch.device, dtype: torch.dtype) -> int:
    """Return up to how many rows a card multiplies with blocks of this type as they lie; 0: it unpacks them.

    No card has run the kernel yet: of one that is only planned for nothing is promised.
    """
    is_known = name in NAMES and dtype in {torch.bfloat16, torch.float16}
    if not is_known or device.type != "cuda" or not torch.cuda.device_count():
        return 0
    found = _few_rows(name, device, dtype) if is_right_on(name, device, dtype) else 0
    if not found and find_spec("triton") is not None:
        _say_unpacked(name)
    return found


def is_right_on(name: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a card computes what it should: the kernel is compiled and tried when that is first asked."""
    return works_on(device, dtype, _trial(name), f"products with {name}")


def product(name: str, blocks: Tensor, rows: Tensor, bias: Tensor | None, *, turn: tuple[int, int] = (1, 1)) -> Tensor:
    """Return rows [..., i] times blocks uint8 [..., bytes], whose rows are those of a weight: [..., r].

    Of a `turn` of (n, m) weight rows that follow each other in the file, every nth one is beside the first.
    """
    given = rows.reshape(-1, rows.shape[-1]).contiguous()
    blocks = blocks.reshape(-1, blocks.shape[-1]).contiguous()
    if not lie_at_words(TYPES[name], blocks):
        _say_where(name)
        blocks = blocks.clone()
    out = given.new_empty(len(given), len(blocks))
    if out.numel():
        launch(name, blocks, given, bias, out, turn)
    return out.view(*rows.shape[:-1], len(blocks))


def launch(
    name: str, blocks: Tensor, given: Tensor, bias: Tensor | None, out: Tensor, turn: tuple[int, int] = (1, 1)
) -> None:
    """Write rows [n, i] times blocks [r, bytes], plus [r], to [n, r]: all of them contiguous."""
    kernels, block = import_module("offload.formats.gguf_triton"), TYPES[name]
    words = blocks.view(WORDS[word_bytes(block)])
    halves = words if block.num_bytes % 2 else blocks.view(torch.float16)
    programs = -(-len(out) // TILE_ROWS) * -(-len(blocks) // TILE)
    with torch.cuda.device(out.device) if out.is_cuda else nullcontext():
        kernels.multiply[(programs,)](
            words, halves, given, out if bias is None else bias, out,
            len(out), len(blocks), given.shape[-1] // block.weights, *turn,
            read=kernels.READS[name], has_bias=bias is not None, **sizes(name),
        )  # fmt: skip


def sizes(name: str) -> dict[str, int]:
    """Return what the kernel is compiled for."""
    block = TYPES[name]
    return {
        "weights": block.weights, "size": block.num_bytes, "each": word_bytes(block),
        "at_once": COLUMNS_AT_ONCE // block.weights, "width": SCALED_COLUMNS.get(name, 32),
        "tile_rows": TILE_ROWS, "tile": TILE,
    }  # fmt: skip


@functools.cache
def _say_unpacked(name: str) -> None:
    """Say once for each type that a card unpacks it, though Triton is there."""
    logger.warning("weights of %s are unpacked in each pass: a kernel for products with them is not used here", name)


@functools.cache
def _say_where(name: str) -> None:
    """Say once for each type that its blocks lie so that the kernel cannot read them."""
    logger.warning("blocks of %s do not lie at multiples of their words: they are copied in each pass", name)


@functools.cache
def _few_rows(name: str, device: torch.device, dtype: torch.dtype) -> int:
    """Return the number of rows above which products with unpacked weights are faster, as timed here."""
    if not runs_on(name, device, dtype):
        return FEW_ROWS[0]  # torch's operations move ten times the bytes
    block, (count, columns) = TYPES[name], TIMED_SHAPE
    blocks = torch.ones(count, columns // block.weights * block.num_bytes, dtype=torch.uint8, device=device)
    weight = torch.empty(TIMED_SHAPE, dtype=dtype, device=device)

    def unpacked(rows: Tensor) -> Tensor:
        unpack_on_card(block, blocks, weight)
        return linear(rows, weight)

    def is_faster(num_rows: int) -> bool:
        rows = torch.ones(num_rows, columns, dtype=dtype, device=device)
        return fastest_s(lambda: product(name, blocks, rows, None)) < fastest_s(lambda: unpacked(rows))

    return next(filter(is_faster, FEW_ROWS), 0)


@functools.cache
def _trial(name: str) -> Callable[[torch.device, torch.dtype], bool]:
    return functools.partial(_is_right, name)


def _is_right(name: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether products are those of unpacked weights, but for what is rounded, and a row alone has its bits.

    Activations are of sizes so different that sums over the columns of a scale are rounded, too.
    """
    block, (count, columns) = TYPES[name], SAMPLE_SHAPE
    row_blocks = columns // block.weights
    every = torch.arange(SAMPLE_BLOCKS * block.num_bytes, device=device).square_().remainder_(SAMPLE_PRIME)
    every = every.remainder_(256).to(torch.uint8).view(SAMPLE_BLOCKS, -1)
    numbers = torch.empty(SAMPLE_BLOCKS, block.weights, device=device)
    block.unpack(every, numbers)
    largest = numbers.abs().amax(1)
    usual = ((largest > 2**-6) & (largest < 2**3)).nonzero().flatten()
    chosen = usual[torch.arange(count * row_blocks, device=device) % len(usual)]
    blocks, weight = every[chosen].view(count, -1), numbers[chosen].view(count, -1).double()
    places = torch.arange(SAMPLE_ROWS * weight.shape[1], device=device).view(SAMPLE_ROWS, -1)
    given = (places.sin() * torch.exp2(-(places % 13))).to(dtype)
    bias = torch.arange(count, device=device).div(count).to(dtype)
    found, exact = product(name, blocks, given, bias), given.double() @ weight.T + bias.double()
    rounding = torch.finfo(dtype).eps / 2 * exact.abs() + torch.finfo(dtype).tiny
    error = rounding + LARGEST_ERROR * (given.double().abs() @ weight.abs().T + bias.double())
    is_near = bool(((found.double() - exact).abs() <= error).all())
    few = [slice(17), *(slice(row, row + 1) for row in ALONE)]
    return is_near and all(torch.equal(product(name, blocks, given[rows], bias), found[rows]) for rows in few)
