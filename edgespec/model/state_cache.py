"""What a recurrent function keeps of one text in one layer: a state, and rows behind it that are not in the state yet.

A state cannot forget a row, so the rows of a tree stay beside it. Those that become text are folded into it when the
next rows come; a pass that is cut and made again finds the state that it found before. A long text is folded while it
is read, all but its last rows, and that state counts once its rows are text. Nothing is ever written to, so that
caches may share states. Legend: r rows behind the state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

Rows = tuple[Tensor, ...]  # [r, ...] each
Fold = Callable[[Tensor, Rows, int], tuple[Tensor, Rows]]  # takes so many rows into a state; returns it and the rest

# So many rows at a text's end stay unfolded when it is read: the next turn's prompt may differ from them.
OPEN_ROWS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRows:
    """The state behind the first `start` rows of a text, and the rows that follow."""

    start: int
    state: Tensor
    rows: Rows = ()

    @property
    def num_open(self) -> int:
        """The number of rows behind the state."""
        return self.rows[0].shape[0] if self.rows else 0

    @property
    def end(self) -> int:
        """The number of rows of the text, those behind the state included."""
        return self.start + self.num_open

    def until(self, end: int) -> StateRows:
        """Return the same without the rows from `end` on, which lies behind the state."""
        return replace(self, rows=tuple(part[: end - self.start] for part in self.rows))


class StateCache:
    """The state of a text, and the rows behind it."""

    def __init__(self, initial: Tensor, fold: Fold) -> None:
        """Begin a text with its `initial` state."""
        self._fold = fold
        self._kept = StateRows(start=0, state=initial)
        self._ahead: StateRows | None = None  # of a text that is being read; it replaces what is kept
        self._turn: StateRows | None = None  # at the end of the long text that was read last

    @property
    def length(self) -> int:
        """The number of rows in use."""
        return self._last.end

    @property
    def num_bytes(self) -> int:
        """The memory of states and rows."""
        held = [part for part in (self._kept, self._ahead, self._turn) if part is not None]
        storages = [tensor.untyped_storage() for part in held for tensor in (part.state, *part.rows)]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def at(self, committed: int) -> StateRows:
        """Return what new rows continue; rows that are `committed` are folded."""
        self.settle(committed)
        kept = self._kept
        if self._ahead is None and committed > kept.start:
            state, rest = self._fold(kept.state, kept.rows, committed - kept.start)
            self._kept = StateRows(start=committed, state=state, rows=rest)
        return self._last

    def append(self, rows: Rows) -> None:
        """Keep a copy of new rows behind the others."""
        last = self._last
        before = last.rows or tuple(part[:0] for part in rows)
        rows = tuple(torch.cat(pair) for pair in zip(before, rows, strict=True))
        self._replace_last(replace(last, rows=rows))

    def fold_open(self) -> StateRows:
        """Fold all rows of a text that is being read, and return what the next ones continue."""
        last = self._last
        if last.num_open:
            state, _ = self._fold(last.state, last.rows, last.num_open)
            last = self.advance(last.num_open, state)
        return last

    def advance(self, count: int, state: Tensor) -> StateRows:
        """Go on from the state that lies `count` rows ahead, with no rows behind it yet."""
        self._turn = None  # one that is older than this text is worth less than its memory
        self._ahead = StateRows(start=self._last.start + count, state=state)
        return self._ahead

    def settle(self, committed: int) -> None:
        """Keep the state ahead if its rows have become text."""
        if self._ahead is not None and self._ahead.start <= committed:
            self._turn = self._ahead.until(committed)
            self._kept = self._ahead
            self._ahead = None

    def keep(self, committed: int, rows: Tensor) -> None:
        """Keep `rows` [j], counted from the text's start, behind the first `committed` ones; drop the rest."""
        last = self._last
        before = torch.arange(last.start, committed, device=rows.device)
        kept = torch.cat([before, rows]) - last.start
        self._replace_last(replace(last, rows=tuple(part.index_select(0, kept) for part in last.rows)))

    def window(self, rows: int) -> int:
        """Return the length, `rows` at most, that the text can be cut to."""
        if self._kept.start <= rows:
            return rows
        return min(rows, self._turn.end) if self._turn is not None and self._turn.start <= rows else 0

    def truncate(self, rows: int) -> None:
        """Forget what lies behind the first `rows`, which the text can be cut to."""
        if self._ahead is not None and self._ahead.start > rows:
            self._ahead = None
        if self._turn is not None and self._turn.start > rows:
            self._turn = None
        if self._last.start > rows:
            assert self._turn is not None
            self._kept = self._turn
        self._replace_last(self._last.until(rows))

    def copy(self, rows: int) -> StateCache:
        """Return a cache of its own with the first `rows` rows, which the text can be cut to."""
        other = StateCache(self._kept.state, self._fold)
        other._kept, other._ahead, other._turn = self._kept, self._ahead, self._turn
        other.truncate(rows)
        return other

    @property
    def _last(self) -> StateRows:
        return self._kept if self._ahead is None else self._ahead

    def _replace_last(self, last: StateRows) -> None:
        if self._ahead is None:
            self._kept = last
        else:
            self._ahead = last
