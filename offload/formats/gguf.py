"""Weights in GGML's blocks: rows of blocks, whose type the name of the part says.

llama.cpp rotates neighbours where transformers rotates the two halves of a head. Its converter therefore stores the
rows of these halves in turn, in architectures like Llama. Such a part is [heads, rows of a head, bytes].
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from offload.checkpoint import split_number
from offload.formats.gguf_bits import eighths, half, halves
from offload.formats.gguf_blocks import LEAVES, BlockType, EvenBlocks, Read, fifth_bits, scales_and_minima
from offload.formats.gguf_kernel import runs_on, unpack_on_card
from offload.formats.gguf_unpacking import is_native, unpack_blocks
from offload.formats.published import PublishedWeight, StoredMatrices, stored_matrices, weights_at_once
from offload.formats.storage import EvenSteps, Steps, StorageFormat, StoredParameter


def _read_q8_0(blocks: Tensor) -> EvenBlocks:
    numbers, scale = blocks[:, 2:] ^ 128, half(blocks, 0)  # from -128 on: their highest bit says which half
    return EvenBlocks(numbers=numbers, scale=scale, minimum=scale * -128)


def _read_q5_0(blocks: Tensor) -> EvenBlocks:
    numbers, scale = halves(blocks[:, 6:], 1).flatten(1) | fifth_bits(blocks[:, 2:6]), half(blocks, 0)
    return EvenBlocks(numbers=numbers, scale=scale, minimum=scale * -16)


def _read_q5_1(blocks: Tensor) -> EvenBlocks:
    numbers = halves(blocks[:, 8:], 1).flatten(1) | fifth_bits(blocks[:, 4:8])
    return EvenBlocks(numbers=numbers, scale=half(blocks, 0), minimum=half(blocks, 2))


def _read_q5_k(blocks: Tensor) -> EvenBlocks:
    scale, minimum = scales_and_minima(blocks)
    numbers = torch.bitwise_left_shift(eighths(blocks[:, 16:48]), 4) | halves(blocks[:, 48:], 4).view(-1, 8, 32)
    return EvenBlocks(numbers=numbers.flatten(1), scale=scale[..., 0], minimum=-minimum[..., 0])


# type -> bits of a number, what reads them; those of four bits are read beside their types
EVEN_READS: dict[str, tuple[int, Read]] = {
    "Q5_0": (5, _read_q5_0), "Q5_1": (5, _read_q5_1), "Q5_K": (5, _read_q5_k), "Q8_0": (8, _read_q8_0),
}  # fmt: skip


NUM_HEAD_DIMENSIONS = 3
EVEN_GROUP = 32  # weights that share a scale and a minimum in types with even steps


def _find(parameter: StoredParameter) -> PublishedWeight | None:
    leaves = [leaf for leaf in LEAVES if parameter.has(leaf)]
    if not leaves:
        return None
    if all(piece.is_in_turn for leaf in leaves for piece in parameter.stored[parameter.sibling(leaf)]):
        return _in_turn(parameter, leaves)
    if len(leaves) > 1:
        names = " and ".join(LEAVES[leaf].name for leaf in leaves)
        raise parameter.cannot_be_used(f"its experts are of several types, {names}")
    block, pieces = LEAVES[leaves[0]], parameter.stored[parameter.sibling(leaves[0])]
    is_transposed = pieces[0].is_transposed
    found = stored_matrices(parameter, {"blocks": parameter.sibling(leaves[0])}, is_transposed=is_transposed)
    if is_transposed and len(parameter.shape) == NUM_HEAD_DIMENSIONS and len(pieces) > parameter.shape[0]:
        found = _joined(found)
    row_bytes = found.columns // block.weights * block.num_bytes
    stored = found.shape("blocks")
    if len(stored) == NUM_HEAD_DIMENSIONS:
        head_rows = found.rows // stored[0]
        shape = (stored[0], head_rows, row_bytes)
        part = found.part("blocks", shape, rows_dim=-3, rows_each=head_rows)
        weight = found.weight(block.name, {"blocks": part}, partial(_unpack_heads, block=block))
        weight = replace(weight, has_kernel=partial(_all_run_on, [block]))
    else:
        part = found.part("blocks", (found.rows, row_bytes), rows_dim=-2)
        unpack = partial(_unpack, block=block)
        weight = found.weight(block.name, {"blocks": part}, unpack, is_transposed=is_transposed)
        weight = replace(weight, has_kernel=partial(_has_kernel, block))
    bits, read_even = EVEN_READS.get(block.name, (4, block.read_even))
    if read_even is None:
        return weight
    even_steps = EvenSteps(
        num_matrices=found.num_matrices,
        bits=bits,
        num_groups=found.columns // EVEN_GROUP,
        in_order=True,
        scales=torch.float16 if block.name == "Q4_0" else None,
        is_middle=block.name == "Q4_0",
        read=lambda stored: _steps(weight.by_matrix(stored)["blocks"], block, read_even),
    )
    return replace(weight, even_steps=even_steps)


def _steps(blocks: Tensor, block: BlockType, read_even: Read) -> Steps:
    """Return the even steps of blocks [n, r, bytes], or [n, heads, rows, bytes]."""
    matrices = blocks.shape[0]
    whole = _in_order(blocks) if blocks.ndim > NUM_HEAD_DIMENSIONS else blocks
    rows = math.prod(whole.shape[1:-1])
    found = read_even(whole.reshape(-1, block.num_bytes))
    scale, minimum = (part.view(matrices, rows, -1) for part in (found.scale, found.minimum))
    numbers = found.numbers.view(matrices, rows, scale.shape[-1], -1)
    # A group of equal weights has no scale to measure its minimum by: its weights are one step from zero.
    is_flat = (scale == 0)[..., None]
    numbers = torch.where(is_flat, 1, numbers).flatten(-2)
    scale = torch.where(is_flat[..., 0], minimum, scale)
    zeros = torch.where(is_flat[..., 0] | (scale == 0), 0.0, -minimum / torch.where(scale == 0, 1.0, scale))
    return Steps(numbers=numbers, zeros=zeros, scale=scale)


def _in_turn(parameter: StoredParameter, leaves: list[str]) -> PublishedWeight:
    """Return experts [e, i, 2 r] whose rows, in the file, are those of a first matrix and then of a second [r, i].

    All first ones may have blocks of another type than the second ones.
    """
    num_experts, columns, rows = parameter.shape
    pieces = {leaf: parameter.stored[parameter.sibling(leaf)] for leaf in leaves}
    in_order = sorted(leaves, key=lambda leaf: split_number(pieces[leaf][0].name)[1] or 0)
    each = 2 // len(leaves)
    tensors: dict[str, tuple[str, tuple[int, ...], torch.dtype]] = {}
    for leaf in in_order:
        block, name = LEAVES[leaf], parameter.sibling(leaf)
        shape = (rows // 2, columns // block.weights * block.num_bytes)
        odd = next((piece for piece in pieces[leaf] if piece.shape != shape), None)
        if odd is not None or len(pieces[leaf]) != each * num_experts:
            what = f"{len(pieces[leaf])} tensors{'' if odd is None else f' of {list(odd.shape)}'}"
            raise parameter.cannot_be_used(f"'{name}' has {what}, not {each * num_experts} of {list(shape)}")
        tensors[block.name] = (name, (each, *shape), torch.uint8)
    found = StoredMatrices(parameter=parameter, num_matrices=num_experts, rows=rows, columns=columns, tensors=tensors)
    parts = {name: found.part(name, shape, rows_dim=-2, rows_each=2) for name, (_, shape, _) in tensors.items()}
    blocks = [LEAVES[leaf] for leaf in in_order]
    unpack = partial(_unpack_in_turn, block=blocks[0]) if each > 1 else partial(_unpack_two_types, blocks=blocks)
    weight = found.weight(", ".join(parts), parts, unpack, is_transposed=True)
    return replace(weight, has_kernel=partial(_all_run_on, blocks))


def _joined(found: StoredMatrices) -> StoredMatrices:
    """Return the matrices of each expert, which follow each other, as one."""
    num_experts, columns, rows = found.parameter.shape
    name, shape, dtype = found.tensors["blocks"]
    each = found.num_matrices // num_experts
    tensors = {"blocks": (name, (each * shape[0], *shape[1:]), dtype)}
    return replace(found, num_matrices=num_experts, rows=rows, columns=columns, tensors=tensors)


def _has_kernel(block: BlockType, device: torch.device, dtype: torch.dtype) -> bool:
    return is_native(block.name, device, dtype) or runs_on(block.name, device, dtype)


def _all_run_on(blocks: Sequence[BlockType], device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a card has kernels for all of these, which a CPU has not where rows are in another order."""
    return all(runs_on(block.name, device, dtype) for block in blocks)


def _unpack(parts: Mapping[str, Tensor], out: Tensor, *, block: BlockType) -> None:
    """Write blocks [n, r, bytes] as weights [n, r, i], rounded once."""
    _write(block, parts["blocks"], out)


def _unpack_heads(parts: Mapping[str, Tensor], out: Tensor, *, block: BlockType) -> None:
    """Write blocks [n, heads, rows, bytes], the rows of a head's halves in turn, as weights [n, r, i]."""
    blocks = _in_order(parts["blocks"])
    _write(block, blocks, out.unflatten(1, blocks.shape[1:-1]))


def _unpack_in_turn(parts: Mapping[str, Tensor], out: Tensor, *, block: BlockType) -> None:
    """Write blocks [n, 2, rows, bytes] as weights [n, 2 rows, i], a row of the first matrix and then of the second."""
    _write(block, parts[block.name].transpose(1, 2), out.unflatten(1, (-1, 2)))


def _unpack_two_types(parts: Mapping[str, Tensor], out: Tensor, *, blocks: Sequence[BlockType]) -> None:
    """Write blocks [n, 1, rows, bytes] of two types likewise."""
    places = out.unflatten(1, (-1, len(blocks)))
    for number, block in enumerate(blocks):
        _write(block, parts[block.name][:, 0], places[:, :, number])


def _write(block: BlockType, blocks: Tensor, out: Tensor) -> None:
    """Write blocks [..., bytes] as weights [..., i], by one kernel where a card has it and they lie so that it can."""
    if runs_on(block.name, out.device, out.dtype) and unpack_on_card(block, blocks, out):
        return
    numbers = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)
    flat, places = blocks.reshape(-1, block.num_bytes), numbers.view(-1, block.weights)
    # All come here together where there is a kernel, and a card has room for the temporaries of some.
    at_once = weights_at_once(out.device) // block.weights if out.is_cuda else max(1, len(flat))
    for some, place in zip(flat.split(at_once), places.split(at_once), strict=True):
        unpack_blocks(block, some, place)
    if numbers is not out:
        out.copy_(numbers)


def _in_order(heads: Tensor) -> Tensor:
    """Return rows [n, heads, rows, bytes] with a head's halves one after the other: [n, heads, 2, rows / 2, bytes]."""
    halves: Tensor = heads.unflatten(-2, (-1, 2))
    return halves.transpose(-2, -3)


GGUF = StorageFormat(name="gguf", methods=("gguf",), detect=_find, leaves=tuple(LEAVES))
