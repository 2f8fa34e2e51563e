"""A long text through the layers in chunks: all chunks pass a layer while its weights are there.

One pass over the weights for a text of any length, with the temporaries of one chunk. The layers'
own forward is called once a chunk, with its share of everything that has a row for each token, and
with the mask that a plain forward over the chunk would have had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from edgespec.errors import EdgespecError
from edgespec.masks import MaskForm

Watch = Callable[[float], None]  # the share of a pass that is done, 0 to 1; may raise, which ends the pass


class LayerMajor:
    """Wraps the forward of decoder layers: chunks within `text`, and a look at the pass before each of them."""

    def __init__(self, layers: nn.ModuleList, masks: MaskForm, *, chunk_rows: int) -> None:
        self.chunk_rows = chunk_rows
        self._masks = masks
        self._text: tuple[int, int] | None = None  # rows before it, and its own
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
        """Within it, the model's forward is over `num_rows` rows of text behind `start` cached ones."""
        self._text = (start, num_rows)
        try:
            yield
        finally:
            self._text = None

    def _wrap(self, index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def watched(share: float) -> None:
            if self.watch is not None:
                self.watch((index + share) / len(self._layers))

        def chunked(*arguments: Any, **named: Any) -> Any:
            if self._text is None:
                watched(0.0)
                return forward(*arguments, **named)
            start, num_rows = self._text
            hidden_states = []
            for first in range(0, num_rows, self.chunk_rows):
                watched(first / num_rows)
                share = _Share(self._masks, start, num_rows, first, min(first + self.chunk_rows, num_rows))
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
            whole = torch.cat(hidden_states, dim=1)
            return (whole, *output[1:]) if isinstance(output, tuple) else whole

        return chunked


class _Share:
    """One chunk's part of a layer's arguments."""

    def __init__(self, masks: MaskForm, start: int, num_rows: int, first: int, end: int) -> None:
        self.is_masked = False
        self._masks, self._start, self._num_rows = masks, start, num_rows
        self._first, self._end = first, end

    def of(self, value: Any) -> Any:
        """The chunk's rows of whatever has one for each token, and the chunk's mask."""
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
