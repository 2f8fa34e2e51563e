"""What texts keep in layers with a state, as the text of a pass reads it and writes new rows behind it."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from edgespec.model.mechanisms.delta_rule import DeltaRule
from edgespec.model.mechanisms.fading_memory import fold_memory, memory_dtype
from edgespec.model.mechanisms.recurrent import state_cache
from edgespec.model.mechanisms.short_convolution import Convolution, fold_inputs
from edgespec.model.mechanisms.state_cache import OPEN_ROWS, StateCache
from edgespec.model.native.layers import NativeDecoder
from edgespec.model.native.records import STATE
from edgespec.model.native.shape import DeltaShape
from edgespec.model.pass_rows import PassRows
from edgespec.model.text_cache import TextCache

MIXER = 0  # its number in a layer


@dataclass(frozen=True, slots=True)
class NewRows:
    """The memory of a text's new rows in a layer."""

    cache: StateCache
    rows: tuple[Tensor, ...]
    are_in_order: bool

    def append(self) -> None:
        """Append them, which the pass has written, and fold what is more than stays open of a text in order."""
        self.cache.append(self.rows)
        num_open = self.cache.num_open
        if self.are_in_order and num_open > 2 * OPEN_ROWS:
            self.cache.fold_ahead(num_open - OPEN_ROWS)


@dataclass(frozen=True, slots=True)
class StatesInPass:
    """The states of all texts of a pass, and the memory of its rows."""

    records: Any  # [layers, texts]
    new_rows: list[NewRows]
    keeps: Sequence[Tensor]  # that records have addresses of

    def append(self) -> None:
        """Append the new rows to their texts' states; the memory of each layer's is given back at once."""
        while self.new_rows:
            self.new_rows.pop().append()


class NativeStates:
    """The states of a decoder's layers."""

    def __init__(self, deltas: Sequence[DeltaShape | None], dtype: torch.dtype) -> None:
        """`deltas` are those of all layers."""
        self._deltas, self._dtype = deltas, dtype
        self._memory_dtype = memory_dtype(torch.empty(0, dtype=dtype))
        self._row_dtype = torch.float64 if self._memory_dtype == torch.float64 else dtype  # of what rows write

    @staticmethod
    def of(known: NativeDecoder, *, dtype: torch.dtype) -> NativeStates | None:
        """Return those of a decoder; None where no layer has a state."""
        deltas = [known.shapes[layer.kind].delta for layer in known.layers]
        return NativeStates(deltas, dtype) if any(deltas) else None

    def begin(self, parts: Sequence[PassRows]) -> StatesInPass:
        """Return the states that new rows of texts continue."""
        found, new_rows, keeps = list[int](), list[NewRows](), list[Tensor]()
        for layer, delta in enumerate(self._deltas):
            for part in parts:
                if delta is None:
                    found += [0] * len(STATE.names)
                    continue
                taps, memory = self._caches(part.cache, layer, delta)
                held = [cache.at(len(part.cache.ids), rows_at_once=OPEN_ROWS) for cache in (memory, taps)]
                assert held[0].start == held[1].start
                assert part.visible is None or held[0].start <= len(part.cache.ids)  # a tree stands behind its text
                made = self._new_rows(delta, part.count)
                in_order = part.visible is None
                new_rows += [NewRows(taps, made[:1], in_order), NewRows(memory, made[1:], in_order)]
                kept = [held[0].state, held[1].state, *held[1].rows, *held[0].rows]
                kept = [tensor.contiguous() for tensor in kept]
                keeps += kept
                no_rows = [0] * (len(STATE.names) - 1 - len(kept) - len(made))
                addresses = [*(tensor.data_ptr() for tensor in kept), *no_rows, *(tensor.data_ptr() for tensor in made)]
                found += [held[0].start, *addresses]
        return StatesInPass((ctypes.c_int64 * len(found))(*found), new_rows, keeps)

    def _caches(self, text: TextCache, layer: int, delta: DeltaShape) -> tuple[StateCache, StateCache]:
        """Return what a layer keeps of a text for its convolution and for its memory."""
        inputs = functools.partial(torch.zeros, delta.taps - 1, delta.channels, dtype=self._dtype)
        memory = functools.partial(
            torch.zeros, delta.heads, delta.key_width, delta.value_width, dtype=self._memory_dtype
        )
        return (
            state_cache(text, layer, MIXER, Convolution.__name__, fold=fold_inputs, initial=inputs),
            state_cache(text, layer, MIXER, DeltaRule.__name__, fold=fold_memory, initial=memory),
        )

    def _new_rows(self, delta: DeltaShape, count: int) -> tuple[Tensor, ...]:
        """Return memory for inputs of the convolution, keys, what rows write, and logarithms of what is left."""
        return (
            torch.empty(count, delta.channels, dtype=self._dtype),
            torch.empty(count, delta.key_heads, delta.key_width, dtype=self._dtype),
            torch.empty(count, delta.heads, delta.value_width, dtype=self._row_dtype),
            torch.empty(count, delta.heads, dtype=self._memory_dtype),
        )
