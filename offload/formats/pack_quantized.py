"""compressed-tensors' whole numbers of four or eight bits in 32-bit words, in groups of columns that share a scale."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from offload.formats.numbers import float_scale, scale_groups, whole_numbers
from offload.formats.packed_format import cannot_be_used
from offload.formats.published import PublishedWeight, sibling, stored_matrices
from offload.stored_names import Pieces

WORD_BITS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class PackQuantized:
    """The format; a weight's shape says how many bits its numbers have."""

    name: str = "pack-quantized"
    methods: tuple[str, ...] = ("compressed-tensors",)

    def detect(
        self, parameter: str, shape: tuple[int, ...], stored: Mapping[str, Pieces], stated: Mapping[str, Any]
    ) -> PublishedWeight | None:
        """Find the format by words of numbers."""
        packed = sibling(parameter, "weight_packed")
        if packed not in stored or stored[packed][0].dtype != torch.int32:
            return None
        if sibling(parameter, "weight_g_idx") in stored:
            raise cannot_be_used(parameter, "its columns are in the order of their activations ('weight_g_idx')")
        names = {"packed": packed, "scale": sibling(parameter, "weight_scale")}
        zeros = sibling(parameter, "weight_zero_point")
        if zeros in stored:
            names["zeros"] = zeros
        found = stored_matrices(parameter, shape, stored, names)
        rows, columns = found.rows, found.columns
        words = {bits: -(-columns * bits // WORD_BITS) for bits in (4, 8)}
        bits = 8 if found.shape("packed") == (rows, words[8]) else 4
        packed_part = found.part("packed", (rows, words[4]), (rows, words[8]), rows_dim=-2)
        groups = found.shape("scale")[-1] if len(found.shape("scale")) == 2 else 1
        if columns % max(1, groups):
            raise cannot_be_used(parameter, f"{columns} columns are no {groups} equal groups")
        parts = {"packed": packed_part, "scale": found.part("scale", (rows, groups), rows_dim=-2)}
        if zeros in stored:
            each = WORD_BITS // bits
            parts["zeros"] = found.part("zeros", (-(-rows // each), groups), rows_dim=-2, rows_each=each)
        return PublishedWeight(
            name=self.name,
            num_matrices=found.num_matrices,
            parts=parts,
            unpack_rows=partial(_unpack, bits=bits),
        )


def _unpack(parts: Mapping[str, Tensor], out: Tensor, *, bits: int) -> None:
    """Write (packed [n, r, i * bits / 32] - zero) times scale [n, r, G]; zeros are packed along rows."""
    rows, columns = out.shape[1:]
    scale = float_scale(parts["scale"])
    numbers = whole_numbers(parts["packed"], bits)[..., :columns].contiguous()
    if "zeros" in parts:
        zeros = whole_numbers(parts["zeros"].mT, bits)[..., :rows].mT  # [n, r, G]
        numbers.view(*scale.shape, -1).sub_(zeros[..., None])
    else:
        numbers.sub_(1 << (bits - 1))
    scale_groups(numbers, scale, out)


PACK_QUANTIZED = PackQuantized()
