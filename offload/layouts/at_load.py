"""The form in which a device multiplies a packed matrix, where that is not the form in which it is stored.

Whole numbers of four bits become int4's. On a CPU those of five to eight bits become two terms of four (`two_terms`):
1.25 bytes a weight. One row takes as long as with weights in bf16, which have 2 bytes, and four rows more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from offload.allocated import allocated_bytes
from offload.formats.packed_format import KeptWeight, Kernel, Packing, layouts_bytes, rows_at_once
from offload.formats.published import PublishedWeight, weights_at_once
from offload.layouts.int4 import INT4
from offload.layouts.int4_orders import NUM_ROWS
from offload.layouts.int4_tiles import order_for
from offload.layouts.two_terms import INT4_TWICE, TwoTerms

SHARE_ROWS = 4096  # of a matrix that a CPU puts in order together
NUMBERS = "numbers"  # the part that has them


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

    @property
    def added_bytes_on_card(self) -> int:
        """The bytes that a card allocates for the form: of all but the numbers, which take the stored ones' place."""
        layouts = self.form.part_shapes(self.shape).items()
        return sum(allocated_bytes(layouts_bytes({name: layout})) for name, layout in layouts if name != NUMBERS)

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
        layouts = self.form.part_shapes(self.shape)
        for start in range(0, rows, at_once):
            end = min(start + at_once, rows)
            kept = _kept(self.packing, (end - start, columns), device)
            assert kept is not None
            for part, made in kept.repack("weight", self.packing.parts_of_rows(parts, start, end)).items():
                size, dtype = layouts[part]
                place = whole.setdefault(part, torch.empty(size, dtype=dtype, device=made.device))
                rows_dim = next((dim for dim, length in enumerate(made.shape) if length != size[dim]), None)
                if rows_dim is not None:  # else all rows are in one share, or have the part in common
                    place = place.narrow(rows_dim, start * size[rows_dim] // rows, made.shape[rows_dim])
                place.copy_(made)
        return whole


def kernel_form(
    packing: Packing, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> KernelForm | None:
    """Return the form in which a matrix that is packed otherwise is multiplied; None where there is none."""
    is_matrix = len(shape) == 2 and math.prod(shape) > 0
    if not is_matrix or not isinstance(packing, PublishedWeight) or packing.even_steps is None:
        return None
    kept = _kept(packing, shape, device)
    if kept is None:
        return None
    form = kept.packing
    kernel = (form.kernel_of_any_rows if isinstance(form, TwoTerms) else form.kernel)(shape, dtype, device)
    if kernel is None:
        return None
    return KernelForm(packing=packing, form=form, shape=(shape[0], shape[1]), kernel=kernel)


def _kept(packing: Packing, shape: tuple[int, ...], device: torch.device) -> KeptWeight | None:
    """Return how a weight keeps its numbers: as they are, or in two terms."""
    int4 = replace(INT4, order=order_for(device, INT4.order))
    return int4.keeping(packing, shape) or INT4_TWICE.in_terms(packing, shape)
