"""A pass of many rows passes each layer in chunks, while the layer's weights are there.

Rows of any number take one pass over the weights, with the temporaries of one chunk. The layers' own forward is
called once a chunk, with its share of everything that has a row for each token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from edgespec.errors import EdgespecError
from edgespec.model.attention_window import AttentionWindow
from edgespec.model.pass_cache import attended
from edgespec.model.pass_rows import Span

Watch = Callable[[float], None]  # the share of a pass that is done, 0 to 1; may raise, which ends the pass


class LayerMajor:
    """Wraps the forward of decoder layers, to split a pass into chunks and to call `watch` before each of them."""

    def __init__(
        self,
        layers: nn.ModuleList,
        *,
        text_by_text: bool,
        mask: Tensor,
        windows: Sequence[AttentionWindow],
        masked_layers: Collection[int],
    ) -> None:
        """`mask` is what the model is given in place of one; with `text_by_text` layers get each text's own instead.

        That one is of the layer's reach. Layers that attend to nothing are none of the `masked_layers`.
        """
        self.watch: Watch | None = None
        self._chunks: Sequence[Sequence[Span]] = ()  # of the pass under way
        self._text_by_text, self._mask, self._reaches = text_by_text, mask, windows
        self._layers, self._masked_layers = layers, masked_layers
        for index, layer in enumerate(layers):
            layer.forward = self._wrap(index, layer.forward)

    def close(self) -> None:
        """Give the layers their own forward back: a wrapped one refers to its layer, and keeps it alive."""
        for layer in self._layers:
            layer.__dict__.pop("forward", None)

    @contextmanager
    def rows(self, chunks: Sequence[Sequence[Span]]) -> Iterator[None]:
        """Within this block, the model's forward is over the rows of these chunks, one after the other."""
        self._chunks = chunks
        try:
            yield
        finally:
            self._chunks = ()

    def _wrap(self, index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def chunked(*arguments: Any, **named: Any) -> Any:
            if not self._chunks:
                return forward(*arguments, **named)  # somebody else's, who brings a mask
            num_rows = sum(span.count for chunk in self._chunks for span in chunk)
            is_masked = self._text_by_text and index in self._masked_layers
            outputs, first = [], 0
            for chunk in self._chunks:
                if self.watch is not None:
                    self.watch((index + first / num_rows) / len(self._layers))
                end = first + sum(span.count for span in chunk)
                share = _Share(num_rows, first, end, self._mask)
                if is_masked:
                    share.own_mask = self._mask_of(index, chunk[0])
                own = functools.partial(
                    forward, *map(share.of, arguments), **{name: share.of(value) for name, value in named.items()}
                )
                outputs.append(attended(chunk, own))
                if is_masked and not share.is_masked:
                    raise EdgespecError(
                        "E_UNSUPPORTED_ARCHITECTURE",
                        "this family's layers do not take the mask that the model is given.",
                        "Use a model of another family.",
                    )
                first = end
            if len(outputs) == 1:
                return outputs[0]
            rows = next(
                _row_dim(value, num_rows) for value in (*arguments, *named.values()) if isinstance(value, Tensor)
            )
            if not isinstance(outputs[0], tuple):
                return torch.cat(outputs, rows or 1)
            others = [
                torch.cat(parts, 1) if isinstance(parts[0], Tensor) and parts[0].dim() == 3 else parts[-1]
                for parts in zip(*(output[1:] for output in outputs), strict=True)
            ]  # such as a router's rows, which the next layer's reads
            return (torch.cat([output[0] for output in outputs], rows or 1), *others)

        return chunked

    def _mask_of(self, index: int, span: Span) -> Tensor:
        num_keys = span.rows.cache.layers[index].length + span.count
        window = self._reaches[index]
        seen = replace(span.seen(num_keys, window), first=0)  # families that mask by themselves want all keys
        return span.mask(seen, window, self._mask.dtype)[None, None]


class _Share:
    """One chunk's part of the arguments of a layer."""

    def __init__(self, num_rows: int, first: int, end: int, mask: Tensor) -> None:
        self.own_mask: Tensor | None = None
        self.is_masked = False
        self._num_rows, self._first, self._end, self._mask = num_rows, first, end, mask

    def of(self, value: Any) -> Any:
        """Return the chunk's rows of a value that has one for each token, and its mask in the place of the model's."""
        if isinstance(value, tuple):
            return tuple(self.of(item) for item in value)
        if not isinstance(value, Tensor):
            return value
        if value is self._mask and self.own_mask is not None:
            self.is_masked = True
            return self.own_mask
        if self._end - self._first == self._num_rows:
            return value
        rows = _row_dim(value, self._num_rows)
        return value if rows is None else value.narrow(rows, self._first, self._end - self._first)


def _row_dim(value: Tensor, num_rows: int) -> int | None:
    """Return the dimension in which a layer's argument has a row for each token; None where it has none.

    Gemma 3n's hidden states come several times over: [copies, 1, rows, h].
    """
    if value.dim() >= 2 and value.shape[1] == num_rows:
        return 1
    return 2 if value.dim() == 4 and value.shape[1:3] == (1, num_rows) else None
