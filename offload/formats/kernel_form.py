"""The form in which a CPU multiplies a packed matrix, where that is not the form in which it is stored.

Whole numbers of four bits become int4's. Those of five to eight bits become two terms of four (`two_terms`): 1.25 bytes
a weight. One row takes as long as with weights in bf16, which have 2 bytes, and four rows more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.formats.int4 import INT4
from offload.formats.packed_format import KeptWeight, Kernel, Packing, layouts_bytes
from offload.formats.published import PublishedWeight
from offload.formats.two_terms import INT4_TWICE, TwoTerms

SHARE_ROWS = 4096  # of a matrix that are put in order together


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelForm:
    """The form of one matrix, in which it is put when it is loaded."""

    packing: PublishedWeight  # as it is stored
    form: Packing
    shape: tuple[int, int]
    kernel: Kernel

    @property
    def has_halves(self) -> bool:
        """Return whether each number has become two."""
        return isinstance(self.form, TwoTerms)

    @property
    def num_bytes(self) -> int:
        """The bytes of its parts."""
        return layouts_bytes(self.form.part_shapes(self.shape))

    def parts_of(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the parts of the same numbers, made of some rows at a time."""
        rows, columns = self.shape
        whole: dict[str, Tensor] = {}
        layouts = self.form.part_shapes(self.shape)
        for start in range(0, rows, SHARE_ROWS):
            end = min(start + SHARE_ROWS, rows)
            kept = _kept(self.packing, (end - start, columns))
            assert kept is not None
            for part, made in kept.repack("weight", self.packing.parts_of_rows(parts, start, end)).items():
                size, dtype = layouts[part]
                place = whole.setdefault(part, torch.empty(size, dtype=dtype))
                rows_dim = next((dim for dim, length in enumerate(made.shape) if length != size[dim]), 0)
                first = start * size[rows_dim] // rows
                place.narrow(rows_dim, first, made.shape[rows_dim]).copy_(made)
        return whole


def kernel_form(
    packing: Packing, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> KernelForm | None:
    """Return the form in which a matrix that is packed otherwise is multiplied; None where there is none."""
    is_matrix = len(shape) == 2 and math.prod(shape) > 0
    if not is_matrix or not isinstance(packing, PublishedWeight) or packing.even_steps is None:
        return None
    kept = _kept(packing, shape)
    if kept is None:
        return None
    form = kept.packing
    kernel = (form.kernel_of_any_rows if isinstance(form, TwoTerms) else form.kernel)(shape, dtype, device)
    if kernel is None:
        return None
    return KernelForm(packing=packing, form=form, shape=(shape[0], shape[1]), kernel=kernel)


def _kept(packing: Packing, shape: tuple[int, ...]) -> KeptWeight | None:
    """Return how a weight keeps its numbers: as they are, or in two terms."""
    return INT4.keeping(packing, shape) or INT4_TWICE.in_terms(packing, shape)
