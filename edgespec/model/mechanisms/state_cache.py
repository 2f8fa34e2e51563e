"""The cache of a recurrent function for one text in one layer: a state, and open rows, which are not in it yet.

A state cannot forget a row, so the rows of a tree stay open. Those that become text are folded into the state when the
next rows come; a pass that is cut and repeated begins with the same state. A long text is folded while it is read, all
but its last rows, and that state counts once its rows are text. Tensors are never written to, so that caches may share
states. Legend: r open rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

Rows = tuple[Tensor, ...]  # [r, ...] each
Fold = Callable[[Tensor, Rows, int], tuple[Tensor, Rows]]  # takes the first rows into a state; returns it and the rest

STARTS = "starts"  # of `tensors`: the numbers of a `Window`
NUM_STATES = 2  # of a text: its own, and that of the prompt that was read last, or of the one that is being read
FOLLOWING_ROWS = 64  # that go on from a state at once: temporaries of a row may be as large as a state
OPEN_ROWS = 16  # at the end of a text that is read: the next turn's prompt may differ from them


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRows:
    """The state after the first `start` rows of a text, and the open rows that follow."""

    start: int
    state: Tensor
    rows: Rows = ()

    @property
    def num_open(self) -> int:
        """The number of open rows."""
        return self.rows[0].shape[0] if self.rows else 0

    @property
    def end(self) -> int:
        """The number of rows of the text, open ones included."""
        return self.start + self.num_open

    def until(self, end: int) -> StateRows:
        """Return the same without the open rows from `end` on."""
        return replace(self, rows=tuple(part[: end - self.start] for part in self.rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSizes:
    """The bytes that a layer takes beside keys and values, or all layers of a model."""

    state_bytes: int = 0  # of the states of a text
    row_bytes: int = 0  # of a row beside the states
    work_bytes: int = 0  # of a row's temporaries, in the widest layer
    pair_bytes: int = 0  # of two rows' temporaries, in the widest layer
    level_bytes: int = 0  # of a row's states in the widest layer, where layers are read level by level

    def __add__(self, other: StateSizes) -> StateSizes:
        """Return those of a layer that has both."""
        return StateSizes(**{of.name: getattr(self, of.name) + getattr(other, of.name) for of in fields(StateSizes)})

    def with_layer(self, other: StateSizes) -> StateSizes:
        """Return those of all layers so far and of one more."""
        return StateSizes(
            state_bytes=self.state_bytes + other.state_bytes,
            row_bytes=self.row_bytes + other.row_bytes,
            work_bytes=max(self.work_bytes, other.work_bytes),
            pair_bytes=max(self.pair_bytes, other.pair_bytes),
            level_bytes=max(self.level_bytes, other.level_bytes),
        )

    def texts_bytes(self, *, num_texts: int, rows: int) -> int:
        """Return the bytes of texts under way, each with so many rows of a tree."""
        return num_texts * (NUM_STATES * self.state_bytes + (rows + 2 * OPEN_ROWS) * self.row_bytes)

    def pass_bytes(self, *, chunk_rows: int, rows: int) -> int:
        """Return the bytes of the temporaries of a chunk of rows, each of which sees `rows`."""
        return chunk_rows * (self.work_bytes + rows * self.pair_bytes) + max(rows, FOLLOWING_ROWS) * self.level_bytes


@dataclass(frozen=True, slots=True)
class Window:
    """The lengths that a text can be cut to: those from `start` on, and those of the turn before."""

    start: int
    turn_start: int  # as `start` where there is no turn before
    turn_end: int

    def cut(self, rows: int) -> int:
        """Return the greatest of them up to `rows`."""
        if self.start <= rows:
            return rows
        return min(rows, self.turn_end) if self.turn_start <= rows else 0


def reach(rows: int, cuts: Iterable[Callable[[int], int]]) -> int:
    """Return the greatest length up to `rows` that all states can be cut to, each by its own `cut`."""
    least = min((cut(rows) for cut in cuts), default=rows)
    return rows if least == rows else reach(least, cuts)


class StateCache:
    """The state of a text, and its open rows."""

    def __init__(self, initial: Tensor, fold: Fold | None) -> None:
        """Begin a text with its `initial` state; one that a file has gets its `fold` when new rows come."""
        self.fold = fold
        self._kept = StateRows(start=0, state=initial)
        self._ahead: StateRows | None = None  # of a text that is being read; it will replace `_kept`
        self._turn: StateRows | None = None  # at the end of the long text that was read last

    @property
    def length(self) -> int:
        """The number of rows in use."""
        return self._last.end

    @property
    def num_open(self) -> int:
        """The number of open rows behind the state that new rows continue."""
        return self._last.num_open

    @property
    def num_bytes(self) -> int:
        """The memory of states and rows."""
        held = [part for part in (self._kept, self._ahead, self._turn) if part is not None]
        storages = [tensor.untyped_storage() for part in held for tensor in (part.state, *part.rows)]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def at(self, committed: int, *, rows_at_once: int = 1) -> StateRows:
        """Return the state that new rows continue, and open rows, after folding some of the `committed` ones.

        It stands behind a multiple of `rows_at_once`, whatever the trees that the text was read by.
        """
        self.settle(committed)
        kept, end = self._kept, committed // rows_at_once * rows_at_once
        if self._ahead is None and end > kept.start:
            assert self.fold is not None
            state, rest = self.fold(kept.state, kept.rows, end - kept.start)
            self._kept = StateRows(start=end, state=state, rows=rest)
        return self._last

    def append(self, rows: Rows) -> None:
        """Append a copy of new rows to the open ones."""
        last = self._last
        before = last.rows or tuple(part[:0] for part in rows)
        rows = tuple(torch.cat(pair) for pair in zip(before, rows, strict=True))
        self._replace_last(replace(last, rows=rows))

    def fold_open(self) -> StateRows:
        """Fold all rows of a text that is being read, and return the state that the next ones continue."""
        if self.num_open:
            self.fold_ahead(self.num_open)
        return self._last

    def fold_ahead(self, count: int) -> None:
        """Fold the first `count` open rows of a text that is being read: that state counts once they are text."""
        assert self.fold is not None
        state, rest = self.fold(self._last.state, self._last.rows, count)
        self._ahead = replace(self.advance(count, state), rows=rest)

    def advance(self, count: int, state: Tensor) -> StateRows:
        """Continue from the state `count` rows ahead, which has no open rows."""
        self._turn = None  # an older one is not worth its memory
        self._ahead = StateRows(start=self._last.start + count, state=state)
        return self._ahead

    def settle(self, committed: int) -> None:
        """Make the state ahead the kept one if its rows have become text."""
        if self._ahead is not None and self._ahead.start <= committed:
            self._turn = self._ahead.until(committed)
            self._kept = self._ahead
            self._ahead = None

    def keep(self, committed: int, rows: Tensor, *, num_in_place: int = 0) -> None:
        """Keep `rows` [j], counted from the text's start, after the first `committed` ones; drop the rest."""
        last = self._last
        if num_in_place == rows.shape[0] and last.end == committed + num_in_place:  # nothing is dropped
            return
        before = torch.arange(last.start, committed, device=rows.device)
        kept = torch.cat([before, rows]) - last.start
        self._replace_last(replace(last, rows=tuple(part.index_select(0, kept) for part in last.rows)))

    def window(self, rows: int) -> int:
        """Return the greatest length up to `rows` that the text can be cut to."""
        return self._window.cut(rows)

    def truncate(self, rows: int) -> None:
        """Drop the rows after the first `rows`, a length that the text can be cut to."""
        if self._ahead is not None and self._ahead.start > rows:
            self._ahead = None
        if self._turn is not None and self._turn.start > rows:
            self._turn = None
        if self._last.start > rows:
            assert self._turn is not None
            self._kept = self._turn
        self._replace_last(self._last.until(rows))

    def copy(self, rows: int) -> StateCache:
        """Return a copy of the first `rows` rows, a length that the text can be cut to."""
        other = StateCache(self._kept.state, self.fold)
        other._kept, other._ahead, other._turn = self._kept, self._ahead, self._turn
        other.truncate(rows)
        return other

    def tensors(self, count: int) -> Iterator[tuple[str, Tensor]]:
        """Yield what a text has, by name, once rows after its `count` ones are cut off."""
        window = self._window
        yield f".{STARTS}", torch.tensor([window.start, window.turn_start, window.turn_end])
        for name, held in ((".kept", self._kept), (".turn", self._turn)):
            if held is not None:
                yield name, held.state
                yield from ((f"{name}.{index}", part) for index, part in enumerate(held.rows))

    @classmethod
    def filled(cls, read: Callable[[str], Tensor | None]) -> StateCache:
        """Return a cache with what another had; `read` gives its `tensors` by their names."""
        starts, state = read(STARTS), read("kept")
        assert starts is not None
        assert state is not None
        window, found = Window(*starts.tolist()), cls(state, None)
        found._kept = _read_rows(read, "kept", state, window.start)
        if (turn := read("turn")) is not None:
            found._turn = _read_rows(read, "turn", turn, window.turn_start)
        return found

    @property
    def _window(self) -> Window:
        kept, turn = self._kept, self._turn
        return Window(kept.start, *((kept.start, kept.start) if turn is None else (turn.start, turn.end)))

    @property
    def _last(self) -> StateRows:
        return self._kept if self._ahead is None else self._ahead

    def _replace_last(self, last: StateRows) -> None:
        if self._ahead is None:
            self._kept = last
        else:
            self._ahead = last


def _read_rows(read: Callable[[str], Tensor | None], name: str, state: Tensor, start: int) -> StateRows:
    parts = itertools.takewhile(lambda part: part is not None, (read(f"{name}.{index}") for index in itertools.count()))
    return StateRows(start=start, state=state, rows=tuple(part for part in parts if part is not None))
