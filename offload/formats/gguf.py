"""Weights in GGML's blocks: rows of blocks, whose type the name of the part says.

llama.cpp rotates neighbours where transformers rotates the two halves of a head. Its converter therefore stores the
rows of these halves in turn, in architectures like Llama. Such a part is [heads, rows of a head, bytes].
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import Tensor

from offload.formats.gguf_blocks import LEAVES, BlockType
from offload.formats.packed_format import StoredParameter
from offload.formats.published import PublishedFormat, PublishedWeight, stored_matrices

NUM_HEAD_DIMENSIONS = 3


def _find(parameter: StoredParameter) -> PublishedWeight | None:
    leaves = [leaf for leaf in LEAVES if parameter.has(leaf)]
    if not leaves:
        return None
    if len(leaves) > 1:
        names = " and ".join(LEAVES[leaf].name for leaf in leaves)
        raise parameter.cannot_be_used(f"its experts are of several types, {names}")
    block = LEAVES[leaves[0]]
    found = stored_matrices(parameter, {"blocks": parameter.sibling(leaves[0])})
    row_bytes = found.columns // block.weights * block.num_bytes
    stored = found.shape("blocks")
    if len(stored) == NUM_HEAD_DIMENSIONS:
        head_rows = found.rows // stored[0]
        shape = (stored[0], head_rows, row_bytes)
        part = found.part("blocks", shape, rows_dim=-3, rows_each=head_rows)
        return found.weight(block.name, {"blocks": part}, partial(_unpack_heads, block=block))
    part = found.part("blocks", (found.rows, row_bytes), rows_dim=-2)
    return found.weight(block.name, {"blocks": part}, partial(_unpack, block=block))


def _unpack(parts: Mapping[str, Tensor], out: Tensor, *, block: BlockType) -> None:
    """Write blocks [n, r, bytes] as weights [n, r, i]."""
    block.unpack(parts["blocks"].reshape(-1, block.num_bytes), out.view(-1, block.weights))


def _unpack_heads(parts: Mapping[str, Tensor], out: Tensor, *, block: BlockType) -> None:
    """Write blocks [n, heads, rows, bytes], the rows of a head's halves in turn, as weights [n, r, i]."""
    halves = parts["blocks"].unflatten(-2, (-1, 2)).transpose(-2, -3)  # [n, heads, 2, rows / 2, bytes]
    _unpack({"blocks": halves}, out, block=block)


GGUF = PublishedFormat(name="gguf", methods=(), detect=_find)
