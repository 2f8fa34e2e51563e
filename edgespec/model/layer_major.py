"""The rows of a pass go through each layer in chunks, while the layer's weights are there.

Any number of rows takes one pass over the weights, with the temporaries of one chunk. The layer's own forward is
called once for each chunk, with the chunk's share of each argument that has a row for each token. Where texts have
masks of their own, so is its attention for each span of a chunk: the experts of a mixture are for all of them.
"""

import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from edgespec.errors import EdgespecError
from edgespec.model.mechanisms.mechanism import Uninstall, wrap_forwards
from edgespec.model.mechanisms.windows import AttentionWindow
from edgespec.model.pass_cache import attended, spans_under_way
from edgespec.model.pass_rows import Span
from edgespec.model.row_shares import RowShare, joined_outputs, row_dim, zero_rows

Watch = Callable[[float], None]  # takes the finished share of a pass, 0 to 1; an error that it raises ends the pass


class LayerMajor:
    """Wraps the forward of decoder layers: a pass is split into chunks, and each chunk of a layer is reported."""

    def __init__(
        self,
        layers: nn.ModuleList,
        *,
        mask: Tensor,
        windows: Sequence[AttentionWindow],
        sources: Sequence[int],
        masked_layers: Collection[int],
        needs_mask: bool = True,
        aux_layers: Collection[int] = (),
    ) -> None:
        """`mask` is the placeholder that the model gets as its mask.

        The attention of `masked_layers`, or these as a whole where it is not found, gets each text's own mask in its
        place, cut to the layer's window, where it `needs_mask`; each text passes alone. `sources` names the layer whose
        keys each one reads.
        What goes into `aux_layers` is kept until `take_aux_states`; of as many layers as there are, it is what leaves
        the last one.
        """
        self.aux_layers, self._aux_states = frozenset(aux_layers), dict[int, Tensor]()
        self._watch: Watch | None = None  # of the running pass
        self._chunks: Sequence[Sequence[Span]] = ()  # of the running pass
        self._mask, self._windows, self._sources = mask, windows, sources
        self._layers = layers
        self._attentions = attention_modules(layers, masked_layers)
        self._masked_layers = frozenset() if self._attentions else frozenset(masked_layers)
        for index, layer in enumerate(layers):
            layer.forward = self._wrap(index, layer.forward)
        for index, attention in self._attentions.items():
            attention.forward = self._wrap_attention(index, attention.forward)
        self._needs_mask = needs_mask

    def close(self) -> None:
        """Restore the layers' own forward: a wrapped one refers to its layer, and keeps it alive."""
        for module in (*self._layers, *self._attentions.values()):
            module.__dict__.pop("forward", None)

    def in_chunks_too(self, decoder: nn.Module) -> Uninstall:
        """Let what a decoder does before and behind its layers take a chunk at a time, too: norms and projections.

        Their sums may have another order for another number of rows. Returns what undoes it.
        """

        def wrapped(part: nn.Module) -> Callable[..., Any]:
            forward = part.forward

            def chunked(*arguments: Any, **named: Any) -> Any:
                counts = [sum(span.count for span in chunk) for chunk in self._chunks]
                rows = row_dim(arguments[0], sum(counts)) if arguments and isinstance(arguments[0], Tensor) else None
                if len(counts) < 2 or rows is None:
                    return forward(*arguments, **named)
                first, *others = arguments
                return torch.cat([forward(own, *others, **named) for own in first.split(counts, rows)], rows)

            return chunked

        parts = [
            part
            for part in decoder.children()
            if not isinstance(part, nn.ModuleList | nn.Embedding) and any(True for _ in part.parameters())
        ]
        return wrap_forwards(parts, wrapped)

    @contextmanager
    def rows(self, chunks: Sequence[Sequence[Span]], watch: Watch | None) -> Iterator[None]:
        """Within this block, the model's forward reads the rows of these chunks; `watch` is called before each."""
        self._chunks, self._watch = chunks, watch
        self._aux_states = {}
        try:
            yield
        except BaseException:
            self._aux_states = {}
            raise
        finally:
            self._chunks, self._watch = (), None

    def take_aux_states(self) -> dict[int, Tensor]:
        """Return what the last pass's rows were before `aux_layers`, [n, h] each, and keep it no more."""
        found, self._aux_states = self._aux_states, {}
        return found

    def _wrap(self, index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def chunked(*arguments: Any, **named: Any) -> Any:
            if not self._chunks:
                return forward(*arguments, **named)  # not our pass: the caller brings a mask
            has_mask = index in self._masked_layers
            self._tap(index, arguments[0] if arguments else named.get("hidden_states"))
            output = self._in_chunks(
                self._chunks, index, forward, arguments, named, has_mask=has_mask, watch=self._watch
            )
            if index == len(self._layers) - 1:
                self._tap(index + 1, output[0] if isinstance(output, tuple) else output)
            return output

        return chunked

    def _tap(self, index: int, hidden: Any) -> None:
        """Keep the residual stream before a layer, where it is one of `aux_layers`."""
        if index not in self.aux_layers:
            return
        if not isinstance(hidden, Tensor) or hidden.dim() != 3:
            what = "the draft reads hidden states between layers, and this target has several streams of them."
            fix = "Use a small model of the target's tokens as draft."
            raise EdgespecError("E_UNSUPPORTED_ARCHITECTURE", what, fix)
        self._aux_states[index] = hidden[0]

    def _wrap_attention(self, index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def chunked(*arguments: Any, **named: Any) -> Any:
            spans = spans_under_way.get()
            if not self._chunks or spans is None:
                return forward(*arguments, **named)
            chunks = [[span] for span in spans]
            return self._in_chunks(chunks, index, forward, arguments, named, has_mask=self._needs_mask, watch=None)

        return chunked

    def _in_chunks(
        self,
        chunks: Sequence[Sequence[Span]],
        index: int,
        forward: Callable[..., Any],
        arguments: Sequence[Any],
        named: Mapping[str, Any],
        *,
        has_mask: bool,
        watch: Watch | None,
    ) -> Any:
        """Return what a forward gives for the rows of all chunks, of which it is given one at a time.

        Rows of texts that are left out of the running pass are not computed; they are zeros.
        """
        num_rows = sum(span.count for chunk in chunks for span in chunk)
        # Who leaves while the layer runs is left out from the next one on: some rows are always computed.
        runs = [list(_runs(chunk)) for chunk in chunks]
        stays = any(not is_left_out for of_chunk in runs for is_left_out, _ in of_chunk)
        outputs: list[Any] = []
        left_out: list[tuple[int, int]] = []  # places in the outputs, and rows
        first = 0
        for of_chunk in runs:
            if watch is not None:
                watch((index + first / num_rows) / len(self._layers))
            for is_left_out, chunk in of_chunk:
                end = first + sum(span.count for span in chunk)
                share = RowShare(num_rows, first, end, self._mask)
                first = end
                if is_left_out and stays:
                    left_out.append((len(outputs), share.count))
                    outputs.append(None)
                    continue
                if has_mask:
                    share.own_mask = self._mask_of(index, chunk[0])
                    share.lent_keys = chunk[0].lent_keys
                own = functools.partial(
                    forward, *map(share.of, arguments), **{name: share.of(value) for name, value in named.items()}
                )
                outputs.append(attended(chunk, own))
                computed = outputs[-1], share.count
                if has_mask and not share.is_masked:
                    what = "this family's layers do not take the mask that the model gets."
                    raise EdgespecError("E_UNSUPPORTED_ARCHITECTURE", what, "Use a model of another family.")
        for place, count in left_out:
            outputs[place] = zero_rows(*computed, count)
        if len(outputs) == 1:
            return outputs[0]
        rows = next(row_dim(value, num_rows) for value in (*arguments, *named.values()) if isinstance(value, Tensor))
        if not isinstance(outputs[0], tuple):
            return torch.cat(outputs, rows or 1)
        others = [joined_outputs(parts) for parts in zip(*(output[1:] for output in outputs), strict=True)]
        return (torch.cat([output[0] for output in outputs], rows or 1), *others)

    def _mask_of(self, index: int, span: Span) -> Tensor:
        num_keys = self._num_keys(index, span)
        window = self._windows[index]
        seen = replace(span.seen(num_keys, window), first=0)  # families that mask by themselves expect all keys
        blocks = span.blocks(has_window=window.size is not None)
        return span.mask(seen, window, self._mask.dtype, blocks)[None, None]

    def _num_keys(self, index: int, span: Span) -> int:
        """Return how many keys of a layer there are for a span: another layer whose keys it reads had all rows."""
        layers, source = span.rows.cache.layers, self._sources[index]
        if source == index:
            return layers[index].length + span.count
        return layers[source].length - span.rows.count + span.end


def attention_modules(layers: nn.ModuleList, indices: Collection[int]) -> dict[int, nn.Module]:
    """Return the attention of each of these layers: its only part that takes a mask; none where one has no such."""
    found = {}
    for index in indices:
        taking = [
            part for part in layers[index].children() if "attention_mask" in signature(type(part).forward).parameters
        ]
        if len(taking) != 1:
            return {}
        (found[index],) = taking
    return found


def _runs(chunk: Sequence[Span]) -> Iterator[tuple[bool, Sequence[Span]]]:
    """Yield the spans of a chunk that follow each other, and whether their texts are left out of the pass."""
    for is_left_out, spans in itertools.groupby(chunk, key=lambda span: span.rows.cache.is_left_out):
        yield is_left_out, list(spans)
