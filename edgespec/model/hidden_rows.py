"""Last hidden states of the rows of a cache: what feature heads read of the target.

They lie beside the cache's rows and follow them: a forward writes them, and an accepted path keeps its own.
Legend: h the model's hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

MIN_ROWS = 128


class HiddenRows:
    """Hidden states [capacity, h], allocated when the first ones come."""

    def __init__(self) -> None:
        self._rows: Tensor | None = None

    def write(self, first: int, hidden: Tensor) -> None:
        """Store the hidden states [n, h] of the rows from `first` on."""
        end = first + hidden.shape[0]
        if self._rows is None or self._rows.shape[0] < end:
            rows = hidden.new_zeros(max(end, 2 * first, MIN_ROWS), hidden.shape[1])
            if self._rows is not None:
                rows[:first] = self._rows[:first]
            self._rows = rows  # whole, or not at all: an interrupt must not lose the text's rows
        self._rows[first:end] = hidden

    def keep(self, committed: int, rows: Tensor) -> None:
        """Move `rows` [j], counted from the start, behind the first `committed` ones."""
        if self._rows is not None and rows.shape[0]:
            self._rows[committed : committed + rows.shape[0]] = self._rows.index_select(0, rows)

    def copy(self, rows: int) -> HiddenRows:
        """Return the first `rows` rows on their own."""
        other = HiddenRows()
        if self._rows is not None:
            other._rows = self._rows[:rows].clone()
        return other

    def before(self, first: int, end: int) -> Tensor:
        """Return the hidden states [end - first, h] of the positions before rows [first, end).

        The position before the text's first token has zeros.
        """
        assert self._rows is not None
        if first > 0:
            return self._rows[first - 1 : end - 1]
        return torch.nn.functional.pad(self._rows[: end - 1], (0, 0, 1, 0))
