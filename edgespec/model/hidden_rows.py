"""The last hidden states of a text's rows, which feature heads read. Legend: h the model's hidden size."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

MIN_HIDDEN_ROWS = 128


class HiddenRows:
    """The last hidden states [capacity, h] of a text's rows, which feature heads read, from the first write on."""

    def __init__(self) -> None:
        self._rows: Tensor | None = None

    def write(self, first: int, hidden: Tensor) -> None:
        """Store the hidden states [n, h] of the rows from `first` on."""
        end = first + hidden.shape[0]
        if self._rows is None or self._rows.shape[0] < end:
            rows = hidden.new_zeros(max(end, 2 * first, MIN_HIDDEN_ROWS), hidden.shape[1])
            if self._rows is not None:
                rows[:first] = self._rows[:first]
            self._rows = rows  # whole, or not at all: an interrupt must not lose the text's rows
        self._rows[first:end] = hidden

    def keep(self, committed: int, rows: Tensor) -> None:
        """Move `rows` [j], counted from the start, after the first `committed` ones."""
        if self._rows is not None and rows.shape[0]:
            self._rows[committed : committed + rows.shape[0]] = self._rows.index_select(0, rows)

    def copy(self, rows: int) -> HiddenRows:
        """Return a copy of the first `rows` rows."""
        other = HiddenRows()
        if self._rows is not None:
            other._rows = self._rows[:rows].clone()
        return other

    def before(self, first: int, end: int) -> Tensor:
        """Return the hidden states [end - first, h] of the positions before rows [first, end); zeros before row 0."""
        assert self._rows is not None
        return self._rows[first - 1 : end - 1] if first > 0 else pad(self._rows[: end - 1], (0, 0, 1, 0))
