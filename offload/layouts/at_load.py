"""The layout in which a matrix is put when it is loaded, where that is not the one in which it is stored.

Whole numbers of four bits become int4's. On a CPU Q8_0, Q6_K and Q5_0 get a byte a number (`byte_lanes`), and others of
five to eight bits become two terms of four (`two_terms`), 1.25 bytes a weight: one row then takes as long as with
weights in bf16, which have 2 bytes, and four rows more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.allocated import allocated_bytes
from offload.formats.published import PublishedWeight, weights_at_once
from offload.formats.storage import PackedStorage, rows_at_once, shapes_bytes
from offload.layouts.int4_orders import NUM_ROWS
from offload.layouts.known import LOSSLESS
from offload.layouts.layout import Kernel, LosslessLayout
from offload.pages import in_large_pages

SHARE_ROWS = 4096  # of a matrix that a CPU puts in order together
NUMBERS = "numbers"  # the part that has them


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutAtLoad:
    """The layout of one matrix, in which it is put when it is loaded."""

    stored: PublishedWeight
    layout: LosslessLayout
    own: PackedStorage  # as it lies there
    shape: tuple[int, int]
    kernel: Kernel

    @property
    def num_bytes(self) -> int:
        """The bytes of its parts."""
        return shapes_bytes(self.own.part_shapes(self.shape))

    @property
    def added_bytes_on_card(self) -> int:
        """The bytes that a card allocates for it: of all but the numbers, which take the stored ones' place."""
        shapes = self.own.part_shapes(self.shape).items()
        return sum(allocated_bytes(shapes_bytes({name: shape})) for name, shape in shapes if name != NUMBERS)

    def parts_on_card(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the parts of the same numbers on a card: the stored ones are lost."""
        made = self.parts_of(parts)
        place = max(parts.values(), key=lambda part: part.nbytes).flatten().view(torch.uint8)[: made[NUMBERS].nbytes]
        return {**made, NUMBERS: place.view_as(made[NUMBERS]).copy_(made[NUMBERS])}

    def parts_of(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the parts of the same numbers, made of some rows at a time."""
        rows, columns = self.shape
        device = next(iter(parts.values())).device
        # On a card temporaries stay within those of unpacking.
        at_once = SHARE_ROWS if device.type == "cpu" else rows_at_once(weights_at_once(device), columns, step=NUM_ROWS)
        whole: dict[str, Tensor] = {}
        shapes = self.own.part_shapes(self.shape)
        for start in range(0, rows, at_once):
            end = min(start + at_once, rows)
            repacked = self.layout.repacked(self.stored, (end - start, columns), device)
            assert repacked is not None
            for part, made in repacked.repack("weight", self.stored.parts_of_rows(parts, start, end)).items():
                size, dtype = shapes[part]
                if part not in whole:
                    whole[part] = in_large_pages(torch.empty(size, dtype=dtype, device=made.device))
                place = whole[part]
                rows_dim = next((dim for dim, length in enumerate(made.shape) if length != size[dim]), None)
                if rows_dim is not None:  # else all rows are in one share, or have the part in common
                    place = place.narrow(rows_dim, start * size[rows_dim] // rows, made.shape[rows_dim])
                place.copy_(made)
        return whole


def layout_at_load(
    stored: PackedStorage, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> LayoutAtLoad | None:
    """Return the layout in which a matrix that is stored otherwise is multiplied; None where there is none."""
    is_matrix = len(shape) == 2 and math.prod(shape) > 0
    if not is_matrix or not isinstance(stored, PublishedWeight):
        return None
    for layout in LOSSLESS:
        repacked = layout.repacked(stored, shape, device)
        kernel = None if repacked is None else layout.kernel(repacked.storage, shape, dtype, device)
        if repacked is not None and kernel is not None:
            own, matrix = repacked.storage, (shape[0], shape[1])
            # The weight is never unpacked.
            kernel = Kernel(multiply=kernel.of_any_rows or kernel.multiply, native=kernel.native)
            return LayoutAtLoad(stored=stored, layout=layout, own=own, shape=matrix, kernel=kernel)
    return None
