"""Floating-point numbers of four bits, in groups of columns that share a scale: NVFP4 and MXFP4.

NVFP4 has a scale of eight bits for 16 numbers and one for the matrix; compressed-tensors divides by the latter,
ModelOpt multiplies. MXFP4 has a power of two for 32 numbers; gpt-oss keeps its experts transposed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offload.formats.numbers import FP4_NUMBERS, float_scale, looked_up, scale_groups
from offload.formats.published import PublishedWeight, StoredPart, sibling, stored_matrices
from offload.stored_names import Pieces


@dataclass(frozen=True, slots=True, kw_only=True)
class Nvfp4:
    """NVFP4, by its two publishers' names of the parts."""

    name: str = "nvfp4"
    methods: tuple[str, ...] = ("compressed-tensors", "modelopt")

    def detect(
        self, parameter: str, shape: tuple[int, ...], stored: Mapping[str, Pieces], stated: Mapping[str, Any]
    ) -> PublishedWeight | None:
        """Find the format by the matrix's own scale."""
        for packed, global_scale, is_divisor in (
            (sibling(parameter, "weight_packed"), sibling(parameter, "weight_global_scale"), True),
            (parameter, sibling(parameter, "weight_scale_2"), False),
        ):
            if packed not in stored or stored[packed][0].dtype != torch.uint8:
                continue
            if global_scale not in stored and (not is_divisor or _has_powers(parameter, stored)):
                continue
            names = {"packed": packed, "scale": sibling(parameter, "weight_scale"), "global_scale": global_scale}
            found = stored_matrices(parameter, shape, stored, names)
            parts = {
                "packed": found.part("packed", (found.rows, found.columns // 2), rows_dim=-2),
                "scale": found.part("scale", (found.rows, found.columns // 16), rows_dim=-2),
                "global_scale": found.part("global_scale", (), (1,), (1, 1)),
            }
            unpack = _unpack_divided if is_divisor else _unpack_multiplied
            return PublishedWeight(name=self.name, num_matrices=found.num_matrices, parts=parts, unpack_rows=unpack)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mxfp4:
    """MXFP4, of gpt-oss and of compressed-tensors."""

    name: str = "mxfp4"
    methods: tuple[str, ...] = ("mxfp4", "compressed-tensors")

    def detect(
        self, parameter: str, shape: tuple[int, ...], stored: Mapping[str, Pieces], stated: Mapping[str, Any]
    ) -> PublishedWeight | None:
        """Find the format by blocks of numbers, or by scales that are powers of two."""
        packed = sibling(parameter, "weight_packed")
        if len(shape) == 3 and any(f"{parameter}_{part}" in stored for part in ("blocks", "scales")):
            return self._blocks(parameter, shape, stored)
        if packed not in stored or stored[packed][0].dtype != torch.uint8 or not _has_powers(parameter, stored):
            return None
        names = {"packed": packed, "scale": sibling(parameter, "weight_scale")}
        found = stored_matrices(parameter, shape, stored, names)
        parts = {
            "packed": found.part("packed", (found.rows, found.columns // 2), rows_dim=-2),
            "scale": found.part("scale", (found.rows, found.columns // 32), rows_dim=-2),
        }
        return self._weight(found.num_matrices, parts, is_transposed=False)

    def _blocks(self, parameter: str, shape: tuple[int, ...], stored: Mapping[str, Pieces]) -> PublishedWeight:
        names = {"packed": f"{parameter}_blocks", "scale": f"{parameter}_scales"}
        found = stored_matrices(parameter, shape, stored, names, is_transposed=True)
        groups = found.columns // 32
        parts = {
            "packed": found.part("packed", (found.rows, groups, 16), rows_dim=-3),
            "scale": found.part("scale", (found.rows, groups), rows_dim=-2),
        }
        return self._weight(found.num_matrices, parts, is_transposed=True)

    def _weight(self, num_matrices: int, parts: dict[str, StoredPart], *, is_transposed: bool) -> PublishedWeight:
        return PublishedWeight(
            name=self.name,
            num_matrices=num_matrices,
            parts=parts,
            unpack_rows=_unpack_blocks if is_transposed else _unpack_powers,
            is_transposed=is_transposed,
        )


def _has_powers(parameter: str, stored: Mapping[str, Pieces]) -> bool:
    """Return whether a weight's scales are powers of two, which are stored as bytes."""
    scale = stored.get(sibling(parameter, "weight_scale"))
    return scale is not None and scale[0].dtype in (torch.uint8, torch.float8_e8m0fnu)


def _unpack_divided(parts: Mapping[str, Tensor], out: Tensor) -> None:
    global_scale = parts["global_scale"].float().view(-1, 1, 1)
    _unpack(parts["packed"], parts["scale"].float() / global_scale, out)


def _unpack_multiplied(parts: Mapping[str, Tensor], out: Tensor) -> None:
    global_scale = parts["global_scale"].float().view(-1, 1, 1)
    _unpack(parts["packed"], parts["scale"].float() * global_scale, out)


def _unpack_powers(parts: Mapping[str, Tensor], out: Tensor) -> None:
    _unpack(parts["packed"], float_scale(parts["scale"]), out)


def _unpack(packed: Tensor, scale: Tensor, out: Tensor) -> None:
    """Write packed [n, r, i / 2] times scale [n, r, G]."""
    scale_groups(looked_up(packed, FP4_NUMBERS), scale, out)


def _unpack_blocks(parts: Mapping[str, Tensor], out: Tensor) -> None:
    """Write blocks [n, r, G, 16] times scale [n, r, G]."""
    _unpack(parts["packed"].flatten(-2), float_scale(parts["scale"]), out)


NVFP4 = Nvfp4()
MXFP4 = Mxfp4()
