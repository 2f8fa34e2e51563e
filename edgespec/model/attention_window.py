"""How far back a layer's rows see: to the text's beginning, through a window, or to the beginning of their own chunk.

All of it is by position, because the rows of a tree are not in the order of their positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionWindow:
    """The positions, its own included, that a row sees: `size` of them at most, or those of its chunk of `size`."""

    size: int | None = None  # None: all
    in_chunks: bool = False  # chunks begin at multiples of their size

    def within(self, num_keys: int) -> AttentionWindow:
        """Return the same reach over so many keys: a limit that none of them meets is none."""
        return self if self.size is not None and self.size < num_keys else WHOLE

    def first_seen(self, position: int) -> int:
        """Return the first position that a row at `position` sees."""
        if self.size is None:
            return 0
        return position // self.size * self.size if self.in_chunks else max(0, position + 1 - self.size)

    def sees(self, rows: Tensor, keys: Tensor) -> Tensor:
        """Return which keys are not too far back for which rows, for positions of any shapes that broadcast."""
        if self.size is None:
            return torch.ones(torch.broadcast_shapes(rows.shape, keys.shape), dtype=torch.bool, device=keys.device)
        if self.in_chunks:
            return rows // self.size == keys // self.size
        return rows - keys < self.size


WHOLE = AttentionWindow()


def causal_mask(num_rows: int, num_keys: int, *, device: torch.device, window: AttentionWindow = WHOLE) -> Tensor:
    """Return which of the keys each of the last rows sees: [rows, keys] bool."""
    keys = torch.arange(num_keys, device=device)
    rows = keys[num_keys - num_rows :, None]
    visible = keys <= rows
    return visible if window.size is None else visible & window.sees(rows, keys)
