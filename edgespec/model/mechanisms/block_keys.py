"""The keys of a text's whole blocks in one layer, by which an index chooses among them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


class BlockKeys:
    """Keys of the first blocks of a text, each made of the keys of its rows: what is dropped is made again.

    So nothing of them is copied with a text, or kept in files.
    """

    def __init__(self, size: int) -> None:
        """Each block has `size` rows."""
        self._size = size
        self._count = 0
        self._keys: Tensor | None = None  # [capacity, width]

    @property
    def num_bytes(self) -> int:
        """The memory of the keys, those not in use included."""
        return 0 if self._keys is None else self._keys.nbytes

    def of(self, count: int, capacity: int, make: Callable[[int, int], Tensor]) -> Tensor:
        """Return the keys [count, width] of the first blocks; `make` gives those from one number up to another.

        Memory is for `capacity` blocks, which grows with that of the rows' keys.
        """
        if count > self._count:
            made = make(self._count, count)
            if self._keys is None or self._keys.shape[0] < count:
                grown = made.new_empty(max(capacity, count), made.shape[-1])
                if self._keys is not None:
                    grown[: self._count] = self._keys[: self._count]
                self._keys = grown
            self._keys[self._count : count] = made
            self._count = count
        elif self._keys is None:  # no block is whole yet
            return make(0, 0)
        return self._keys[:count]

    def cut(self, rows: int) -> None:
        """Drop the blocks that end after the first `rows` rows of the text."""
        self._count = min(self._count, rows // self._size)
