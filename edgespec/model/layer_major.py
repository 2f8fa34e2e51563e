"""A long text, or many texts, pass the layers in chunks: all chunks pass a layer while its weights are there.

A text of any length, or any number of texts, takes one pass over the weights, with the temporaries of one
chunk. The layers' own forward is called once a chunk, with its share of everything that has a row for each
token, and with the mask that a plain forward over the chunk would have had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from edgespec.errors import EdgespecError
from edgespec.model.masks import MaskForm

Watch = Callable[[float], None]  # the share of a pass that is done, 0 to 1; may raise, which ends the pass


class LayerMajor:
    """Wraps the forward of decoder layers, to split a text into chunks and to call `watch` before each of them."""

    def __init__(self, layers: nn.ModuleList, masks: MaskForm, *, chunk_rows: int) -> None:
        self.chunk_rows = chunk_rows
        self._masks = masks
        self._shares: Callable[[], Iterator[_Share | _TextsShare]] | None = None  # of the pass under way
        self.watch: Watch | None = None
        self._layers = layers
        for index, layer in enumerate(layers):
            layer.forward = self._wrap(index, layer.forward)

    def close(self) -> None:
        """Give the layers their own forward back: a wrapped one refers to its layer, and keeps it alive."""
        for layer in self._layers:
            layer.__dict__.pop("forward", None)

    @contextmanager
    def text(self, start: int, num_rows: int) -> Iterator[None]:
        """Within this block, the model's forward is over `num_rows` rows of text behind `start` cached ones."""

        def shares() -> Iterator[_Share]:
            for first in range(0, num_rows, self.chunk_rows):
                yield _Share(self._masks, start, num_rows, first, min(first + self.chunk_rows, num_rows))

        with self._within(shares):
            yield

    @contextmanager
    def texts(self, num_texts: int, num_rows: int) -> Iterator[None]:
        """Within this block, the model's forward is over texts [num_texts, num_rows], without a cache.

        The texts are padded at their ends.
        """
        step = max(1, self.chunk_rows // num_rows)

        def shares() -> Iterator[_TextsShare]:
            masks: dict[int, Tensor] = {}  # one for all chunks of a layer: they differ in nothing
            for first in range(0, num_texts, step):
                yield _TextsShare(self._masks, masks, num_texts, num_rows, first, min(first + step, num_texts))

        with self._within(shares):
            yield

    @contextmanager
    def _within(self, shares: Callable[[], Iterator[_Share | _TextsShare]]) -> Iterator[None]:
        self._shares = shares
        try:
            yield
        finally:
            self._shares = None

    def _wrap(self, index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def watched(share: float) -> None:
            if self.watch is not None:
                self.watch((index + share) / len(self._layers))

        def chunked(*arguments: Any, **named: Any) -> Any:
            if self._shares is None:
                watched(0.0)
                return forward(*arguments, **named)
            hidden_states = []
            for share in self._shares():
                watched(share.done)
                output = forward(
                    *(share.of(value) for value in arguments), **{key: share.of(value) for key, value in named.items()}
                )
                if not share.is_masked:
                    raise EdgespecError(
                        "E_UNSUPPORTED_ARCHITECTURE",
                        "this family's layers do not take the mask that the model is given.",
                        "Use a model of another family.",
                    )
                hidden_states.append(output[0] if isinstance(output, tuple) else output)
            whole = torch.cat(hidden_states, dim=share.dim)
            return (whole, *output[1:]) if isinstance(output, tuple) else whole

        return chunked


class _Share:
    """One chunk's part of the arguments of a layer, for a long text [1, rows]."""

    dim = 1  # along which chunks lie

    def __init__(self, masks: MaskForm, start: int, num_rows: int, first: int, end: int) -> None:
        self.is_masked = False
        self._masks, self._start, self._num_rows = masks, start, num_rows
        self._first, self._end = first, end
        self.done = first / num_rows  # of the layer, when this chunk begins

    def of(self, value: Any) -> Any:
        """Return the chunk's rows of a value that has one for each token, and the chunk's mask for a stand-in."""
        if isinstance(value, tuple):
            return tuple(self.of(item) for item in value)
        if not isinstance(value, Tensor):
            return value
        mask = self._masks.of_stand_in(value, self._start + self._first, self._start + self._end)
        if mask is not None:
            self.is_masked = True
            return mask
        has_rows = value.dim() >= 2 and value.shape[1] == self._num_rows
        return value[:, self._first : self._end] if has_rows else value


class _TextsShare:
    """Some texts' part of the arguments of a layer, for texts [texts, rows]."""

    dim = 0

    def __init__(
        self, masks: MaskForm, made: dict[int, Tensor], num_texts: int, num_rows: int, first: int, end: int
    ) -> None:
        self.is_masked = False
        self._masks, self._made = masks, made
        self._shape, self._first, self._end = (num_texts, num_rows), first, end
        self.done = first / num_texts

    def of(self, value: Any) -> Any:
        """Return the texts' part of a value that has one for each, and for a stand-in the causal mask of all texts."""
        if isinstance(value, tuple):
            return tuple(self.of(item) for item in value)
        if not isinstance(value, Tensor):
            return value
        mask = self._made.get(id(value))
        if mask is None:
            mask = self._masks.of_stand_in(value, 0, self._shape[1])
        if mask is not None:
            self.is_masked = True
            self._made[id(value)] = mask
            return mask
        return value[self._first : self._end] if tuple(value.shape[:2]) == self._shape else value
