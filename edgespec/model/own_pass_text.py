"""One text in a model with passes of its own: its ids, and transformers' own cache, which knows no trees.

The cache is cut back where the family's can be; where it cannot, or where a pass was left in its middle, it is dropped,
and the text is read anew. A cache of windows is told before a chain's pass to keep what falls out of them until it is
cut, to no more than that pass. Legend: n rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from edgespec.model.text_cache import TextCache
from offload.adapters.use import AdapterUse


class OwnPassText(TextCache):
    """The committed ids, and what transformers' forward carries from one call to the next."""

    def __init__(self, adapters: AdapterUse = ()) -> None:
        super().__init__(0, step_rows=0, adapters=adapters)
        self.carried: dict[str, Any] = {}  # the cache, under the name that the family's forward has for it
        self.modules: list[Any] = []  # what the family keeps in its modules
        self.num_read = 0  # rows that the cache has
        self._num_recorded = 0  # rows that were read since a cache that keeps what falls out of windows was last cut
        self._is_torn = False  # whether a pass was begun that has not ended

    @property
    def length(self) -> int:
        """The number of rows that the cache has."""
        return self.num_read

    @property
    def has_states(self) -> bool:
        """Whether the cache may be as large for a short text as for a long one."""
        return True

    @property
    def num_bytes(self) -> int:
        """The memory of what is carried."""
        return sum(tensor.nbytes for tensor in tensors_in([self.carried, self.modules]))

    def begin_pass(self) -> None:
        """Note that a pass changes the cache: until `end_pass` it is of no use."""
        self._is_torn = True

    def end_pass(self, carried: dict[str, Any], num_read: int) -> None:
        """Take what the forward carries on, after so many rows."""
        if any(map(_is_recording, carried.values())):
            self._num_recorded += num_read - self.num_read
        self.carried, self.num_read = carried, num_read
        self._is_torn = False

    def drop_cache(self) -> None:
        """Let the cache go: the text is to be read anew."""
        self.carried, self.modules, self.num_read, self._num_recorded, self._is_torn = {}, [], 0, 0, False

    def truncate(self, rows: int | None = None) -> None:
        """Drop the rows after the first `rows`, or after the text; all of them where the cache cannot be cut there.

        A text that is shortened loses the ids whose rows are gone; else the next pass reads the whole text anew.
        """
        self.is_left_out = False
        length = len(self._ids) if rows is None else rows
        count = max(0, self.num_read - length)
        if self._is_torn or ((count or self._num_recorded) and not self._is_cut(count)):
            self.drop_cache()
        self.num_read = min(self.num_read, length)
        if rows is not None:
            del self._ids[self.num_read :]

    def _is_cut(self, count: int) -> bool:
        """Remove the cache's last rows, and what fell out of its windows; return whether it could be done."""
        caches = [value for value in self.carried.values() if isinstance(value, Cache)]
        if self.modules or len(caches) != 1 or len(caches) != len(self.carried) or count == self.num_read:
            return False
        self._is_torn = True
        with suppress(Exception):  # a family's own cache may refuse in any way
            if not getattr(caches[0], "is_croppable", True):
                return False
            if _is_recording(caches[0]) and count > self._num_recorded:
                return False  # such a cache would lack rows of its windows, and not say so
            caches[0].crop(-count)
            self._num_recorded, self._is_torn = 0, False
        return not self._is_torn

    def copy(self, rows: int) -> OwnPassText:
        """Return a copy of the first `rows` rows of the text; an empty one where the cache cannot be cut there."""
        other = OwnPassText()
        other._ids, other.prompt_tokens, other.prompt_end = list(self._ids), self.prompt_tokens, self.prompt_end
        if rows and not self._is_torn:
            other.carried, other.modules = copy.deepcopy((self.carried, self.modules))
            other.num_read, other._num_recorded = self.num_read, self._num_recorded
        other.truncate(rows)
        return other

    def commit(self, rows: Tensor, ids: list[int], *, num_in_place: int = 0) -> None:
        """Make the rows after the text, which are all in place, part of it."""
        assert num_in_place == rows.shape[0]
        self._ids += ids

    def _rows(self) -> Iterator[tuple[str, Tensor]]:
        """Yield nothing: what is carried has no form of its own in a file."""
        yield from ()

    def fill(self, read: Callable[[str], Tensor | None], ids: list[int], states: Iterable[str] = ()) -> None:
        """Stay empty."""


def record_rows(values: Iterable[Any]) -> None:
    """Let the caches among values keep what falls out of windows until they are cut, where transformers offers that."""
    for value in values:
        if isinstance(value, Cache) and hasattr(value, "activate_past_recording"):  # older versions lack it
            value.activate_past_recording()


def _is_recording(value: Any) -> bool:
    """Return whether a value is a cache that keeps what falls out of windows until it is cut."""
    return any(getattr(layer, "record_past", False) for layer in getattr(value, "layers", ()))


def tensors_in(values: Any) -> Iterable[Tensor]:
    """Return the tensors, each once, in nested lists, dictionaries and objects of a family's own."""
    found: dict[int, Tensor] = {}
    seen: set[int] = set()

    def look(value: Any) -> None:
        if isinstance(value, Tensor):
            found[id(value)] = value
            return
        if id(value) in seen or isinstance(value, str | bytes | int | float | torch.dtype | torch.device | type):
            return
        seen.add(id(value))
        if isinstance(value, dict):
            parts: Sequence[Any] = list(value.values())
        elif isinstance(value, list | tuple):
            parts = value
        else:
            parts = list(vars(value).values()) if hasattr(value, "__dict__") else []
        for part in parts:
            look(part)

    look(values)
    return found.values()
