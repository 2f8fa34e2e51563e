"""A chunk's share of the arguments of a layer that has a row for each token, and its outputs put together again."""

from collections import UserDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class RowShare:
    """One chunk's share of the arguments of a layer."""

    def __init__(self, num_rows: int, first: int, end: int, mask: Tensor) -> None:
        self.own_mask: Tensor | None = None
        self.lent_keys: UserDict[str, tuple[Tensor, ...]] | None = None  # in the place of all rows' own
        self.is_masked = False
        self._num_rows, self._first, self._end, self._mask = num_rows, first, end, mask
        self.count = end - first

    def of(self, value: Any) -> Any:
        """Return the chunk's rows of a value that has a row for each token; its own mask for the placeholder."""
        if isinstance(value, tuple):
            return tuple(self.of(item) for item in value)
        if isinstance(value, dict):  # rotations by their names
            return {name: self.of(item) for name, item in value.items()}
        if isinstance(value, UserDict) and self.lent_keys is not None:
            return self.lent_keys
        if not isinstance(value, Tensor):
            return value
        if value is self._mask and self.own_mask is not None:
            self.is_masked = True
            return self.own_mask
        if self._end - self._first == self._num_rows:
            return value
        rows = row_dim(value, self._num_rows)
        return value if rows is None else value.narrow(rows, self._first, self._end - self._first)


def zero_rows(output: Any, num_rows: int, count: int) -> Any:
    """Return what a layer gave for so many rows, as zeros for another number of rows."""
    if isinstance(output, tuple):
        return tuple(zero_rows(part, num_rows, count) for part in output)
    rows = row_dim(output, num_rows) if isinstance(output, Tensor) else None
    if rows is None:
        return output
    return output.new_zeros([*output.shape[:rows], count, *output.shape[rows + 1 :]])


def joined_outputs(parts: Sequence[Any]) -> Any:
    """Return what chunks gave beside their hidden states, for the next layer: a router's rows, or chosen keys.

    Rows of a short text choose fewer keys than others, [1, rows, k]: their last one is repeated.
    """
    if not isinstance(parts[0], Tensor) or parts[0].dim() != 3:
        return parts[-1]
    width = max(part.shape[2] for part in parts)
    return torch.cat([torch.cat([part, part[..., -1:].expand(-1, -1, width - part.shape[2])], 2) for part in parts], 1)


def row_dim(value: Tensor, num_rows: int) -> int | None:
    """Return the dimension in which a layer's argument has a row for each token; None where it has none.

    Gemma 3n has several copies of its hidden states: [copies, 1, rows, h].
    """
    if value.dim() >= 2 and value.shape[1] == num_rows:
        return 1
    return 2 if value.dim() == 4 and value.shape[1:3] == (1, num_rows) else None
