"""One text in one model: the ids of its committed rows, their keys and values, and those of a tree after them.

A pass appends rows; `commit` moves the rows of an accepted path to the end of the text and drops the others. What
layers keep beside keys and values, or in their place, are states with names (`mechanisms/`): those of recurrent layers
cannot be cut to any length. Legend: h the model's hidden size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Protocol, Self, TypeVar, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from edgespec.model.mechanisms.keys_values import STEP_ROWS, IndexKeys, LayerCache
from edgespec.model.mechanisms.state_cache import StateCache, reach
from edgespec.model.mechanisms.waiting_keys import KeyStream, WaitingRows
from edgespec.model.mechanisms.windows import WHOLE
from offload.adapters.use import AdapterUse as AdapterUse

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


class LayerState(Protocol):
    """What one layer keeps of one text beside keys and values, or in their place."""

    @property
    def length(self) -> int:
        """The number of rows in use."""

    @property
    def num_bytes(self) -> int:
        """The memory that it takes."""

    def keep(self, committed: int, rows: Tensor, *, num_in_place: int = 0) -> None:
        """Make `rows` [j], counted from the text's start, follow its first `committed` ones; drop the rest.

        The first `num_in_place` of them do so already.
        """

    def truncate(self, rows: int) -> None:
        """Drop the rows after the first `rows`."""

    def copy(self, rows: int) -> Self:
        """Return a copy of the first `rows` rows; what is made anew where it is missing need not be in it."""

    def tensors(self, count: int) -> Iterator[tuple[str, Tensor]]:
        """Yield what a text of `count` rows has, as it lies, and what follows the state's own name in theirs."""


State = TypeVar("State", bound=LayerState)


class TextCache:
    """The rows of one text in all layers of a model, and the ids of those that are committed."""

    def __init__(
        self,
        num_layers: int,
        *,
        keeps_hidden: bool = False,
        step_rows: int = STEP_ROWS,
        waiting: KeyStream | None = None,
        adapters: AdapterUse = (),
    ) -> None:
        """With `keeps_hidden`, `features_before` gives the last hidden states of the text's rows.

        `waiting` brings the keys and values of layers that stream, if they wait in RAM. All rows have these `adapters`.
        """
        self.adapters = adapters
        self.layers = [
            LayerCache(step_rows)
            if waiting is None or layer not in waiting.layers
            else WaitingRows(step_rows, waiting, waiting.windows.get(layer, WHOLE))
            for layer in range(num_layers)
        ]
        self.step_rows = step_rows  # that memory grows by
        self._states: dict[str, LayerState] = {}  # by their names, from a layer's first rows on
        self._hidden = HiddenRows() if keeps_hidden else None
        self._ids: list[int] = []
        self.is_left_out = False  # whether the running pass goes on without this text's rows
        self.prompt_tokens = 0  # that the text was first read with: rotations, and ways of experts, may depend on that
        self.num_exact = 0  # of its first rows, those that were read as plain decoding reads this prompt and its text
        # The prompt that was read last, and the last hidden state [1, h] of its end: who asks the same reads nothing.
        self.prompt_end: tuple[Sequence[int], Tensor] | None = None

    @property
    def ids(self) -> Sequence[int]:
        """Return the ids of the first rows; those of a tree or of an unfinished pass come after them."""
        return self._ids

    @property
    def length(self) -> int:
        """The number of rows in use, the same between passes in every layer that keeps any."""
        return max(part.length for part in self._parts)

    @property
    def _parts(self) -> list[LayerCache | LayerState]:
        return [*self.layers, *self._states.values()]

    @property
    def _recurrent(self) -> list[StateCache]:
        return [state for state in self._states.values() if isinstance(state, StateCache)]

    @property
    def has_states(self) -> bool:
        """Whether recurrent layers have read rows of it."""
        return bool(self._recurrent)

    @property
    def num_bytes(self) -> int:
        """The memory of the keys and values, those not in use included, and of states."""
        return sum(part.num_bytes for part in self._parts)

    @property
    def text_bytes(self) -> int:
        """The size of `tensors`."""
        return sum(rows.nbytes for _, rows in self._rows())

    def state(self, name: str, begin: Callable[[], State]) -> State:
        """Return what a layer keeps of this text under this name; `begin` makes it when the first rows come."""
        if name not in self._states:
            self._states[name] = begin()
        return cast(State, self._states[name])

    def index_keys(self, layer: int) -> IndexKeys:
        """Return what the rows keep in a layer for its index, or for its groups of rows."""
        return self.state(f"index.{layer}", lambda: IndexKeys(self.step_rows))

    def truncate(self, rows: int | None = None) -> None:
        """Drop the rows after the first `rows`, or after the text, those of an interrupted pass included.

        Where states do not reach back to `rows`, the text is cut to a length that they reach.
        """
        self.is_left_out = False
        rows = self._reach(len(self._ids) if rows is None else rows)
        del self._ids[rows:]
        self.num_exact = min(self.num_exact, rows)
        if rows == 0:  # a state cannot forget rows
            self._states = {}
        for part in self._parts:
            part.truncate(rows)

    def keep_prefix(self, ids: Sequence[int]) -> int:
        """Keep the rows of the common beginning of the text and `ids`, and return their number."""
        self.truncate(shared_length(self._ids, ids))
        return len(self._ids)

    def _reach(self, rows: int) -> int:
        """Return the greatest length up to `rows` that all states can be cut to."""
        for state in self._recurrent:
            state.settle(len(self._ids))
        return reach(rows, [state.window for state in self._recurrent])

    def copy(self, rows: int) -> TextCache:
        """Return a copy of the first `rows` rows of the text, or of fewer where states do not reach back to `rows`."""
        rows = self._reach(rows)
        other = TextCache(0, step_rows=self.step_rows, adapters=self.adapters)
        other.layers = [layer.copy(rows) for layer in self.layers]
        other._states = {name: state.copy(rows) for name, state in self._states.items()} if rows else {}
        other._hidden = None if self._hidden is None else self._hidden.copy(rows)
        other._ids = self._ids[:rows]
        other.prompt_tokens, other.prompt_end = self.prompt_tokens, self.prompt_end
        other.num_exact = min(self.num_exact, rows)
        return other

    def tensors(self) -> dict[str, Tensor]:
        """Return a copy of the text's rows in the host's memory: tensors by name, whose first dimension counts rows.

        What states have comes whole, as `state.KEY.NAME`. Rows after the text are dropped first.
        """
        self.truncate()
        return {name: _copied(rows) for name, rows in self._rows()}

    def _rows(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and the text's rows, as they lie."""
        count = len(self._ids)
        for index, layer in enumerate(self.layers):
            if layer.capacity:  # some layers read the keys of others
                for name, part in zip(("keys", "values"), layer.rows(count), strict=True):
                    yield f"{name}.{index}", part[0].transpose(0, 1)
        if self._hidden is not None:
            yield "hidden", self._hidden.before(1, count + 1)
        for name, state in self._states.items():
            yield from ((f"{name}{part}", rows) for part, rows in state.tensors(count))

    def fill(self, read: Callable[[str], Tensor | None], ids: list[int], states: Iterable[str] = ()) -> None:
        """Fill an empty cache with the text of these ids; `read` gives another's `tensors` by their names.

        `states` names those that there are; the text ends where all of them reach.
        """
        assert not self._ids
        for index, layer in enumerate(self.layers):
            keys, values = read(f"keys.{index}"), read(f"values.{index}")
            if keys is not None and values is not None:  # some read those of others
                layer.append(keys.transpose(0, 1)[None], values.transpose(0, 1)[None])
            if (index_keys := read(f"index.{index}")) is not None:
                self.index_keys(index).append_rows(index_keys)
        if self._hidden is not None and (hidden := read("hidden")) is not None:
            self._hidden.write(0, hidden)
        for key in states:
            self._states[f"state.{key}"] = StateCache.filled(partial(_named, read, f"state.{key}"))
        self._ids = list(ids)
        self.truncate()

    def commit(self, rows: Tensor, ids: list[int], *, num_in_place: int = 0) -> None:
        """Make `rows` [j], counted from the cache's start, text of these ids; drop the other rows after the text.

        The first `num_in_place` of them follow the text already: where these are all, nothing is copied.
        """
        for part in self._parts:
            part.keep(len(self._ids), rows, num_in_place=num_in_place)
        if self._hidden is not None:
            self._hidden.keep(len(self._ids) + num_in_place, rows[num_in_place:])
        self._ids += ids  # last: an interrupt before leaves the text as it was

    def commit_next(self, ids: list[int]) -> None:
        """Make the first rows after the text part of it, with these ids; later rows stay."""
        self._ids += ids

    def uncommit_last(self) -> None:
        """Take the last token from the text; its row stays until the next `truncate`."""
        self._ids.pop()
        self.num_exact = min(self.num_exact, len(self._ids))

    def write_hidden(self, first: int, hidden: Tensor) -> None:
        """Store the last hidden states [n, h] of the rows from `first` on, where the text keeps them."""
        if self._hidden is not None:
            self._hidden.write(first, hidden)

    def features_before(self, first: int, end: int) -> Tensor:
        """Return the last hidden states [end - first, h] of the positions before rows [first, end); zeros before 0."""
        assert self._hidden is not None
        return self._hidden.before(first, end)


class _PassingLayer(LayerCache):
    """A layer that keeps no rows."""

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return these rows alone."""
        return keys, values


class UncachedText(TextCache):
    """A text that is read once, whole, and keeps no rows, except in layers whose rows other layers read."""

    def __init__(self, shared: Iterable[int] = (), *, prompt_tokens: int = 0, adapters: AdapterUse = ()) -> None:
        super().__init__(1, adapters=adapters)
        self.prompt_tokens = prompt_tokens
        self.layers = defaultdict(_PassingLayer, {layer: LayerCache() for layer in shared})  # type: ignore[assignment]

    @property
    def length(self) -> int:
        """Return 0."""
        return 0

    def state(self, name: str, begin: Callable[[], State]) -> State:
        """Return a new state, which is not kept."""
        del name
        return begin()


def num_in_place(rows: Sequence[int]) -> int:
    """Return how many of a tree's rows, counted from its root, follow each other from the root on."""
    return next((place for place, row in enumerate(rows) if place != row), len(rows))


def shared_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common beginning of two texts."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((row for row, (ours, theirs) in pairs if ours != theirs), min(len(one), len(other)))


def _named(read: Callable[[str], Tensor | None], prefix: str, name: str) -> Tensor | None:
    return read(f"{prefix}.{name}")


def _copied(rows: Tensor) -> Tensor:
    """Return a contiguous copy in the host's memory, also of rows that lie there so already: the text may go on."""
    return torch.empty(rows.shape, dtype=rows.dtype).copy_(rows)
