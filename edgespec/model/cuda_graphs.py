"""Passes of few shapes, which a device can record once and replay: the draft's calls as CUDA graphs.

A small model's pass has hundreds of launches, each of which takes longer to issue than to run. The rows of a text's
tree are padded to one of a few counts, and see all places of a cache of fixed capacity through a mask, so that passes
differ only in the contents of tensors. Padding rows are written to the cache's last place, which no other row sees.
Legend: n rows, b with the padding; c the places of the cache.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PretrainedConfig

from edgespec.machine.device import CudaGraphs
from edgespec.model.layer_kinds import num_chosen
from edgespec.model.mechanisms.keys_values import LayerCache, rows_held
from edgespec.model.mechanisms.known import mechanisms_of
from edgespec.model.mechanisms.windows import WHOLE, key_sources, layer_reaches
from edgespec.model.pass_rows import PassRows, SeenKeys, Span
from edgespec.model.text_cache import TextCache

ROWS = (1, 8, 32, 64, 128, 256, 512, 768)  # that a pass is padded to; a larger pass runs as it is
WORKSPACE_BYTES = 32 << 20  # of cuBLAS, for a stream of Hopper's; others have 8 MiB
CAPACITY_ROWS = 1024  # that a cache grows by; all passes are then recorded again

Run = Callable[[Sequence[PassRows], Sequence[Sequence[Span]]], list[Tensor]]


def recorded_bytes(
    config: PretrainedConfig, *, rows: int, dtype: torch.dtype, temporaries: Callable[[int, int], int]
) -> int:
    """Return the bytes of recorded passes over a cache of so many rows: masks, hidden states, a library's workspace.

    Their `temporaries`, of so many rows and keys, come once more: other passes cannot use that memory.
    """
    capacity = rows_held(rows, CAPACITY_ROWS)
    kept = sum(ROWS) * (capacity + int(config.hidden_size)) * dtype.itemsize
    return WORKSPACE_BYTES + kept + temporaries(ROWS[-1], capacity)


def has_static_passes(config: PretrainedConfig) -> bool:
    """Return whether all layers keep their own keys and values and see all of them, and none has experts."""
    if num_chosen(config) or not all(record.is_static for record in mechanisms_of(config)):
        return False
    windows = [getattr(of, "sliding_window", None) for of in config.per_layer_config]
    sees_all = not any(windows) and all(window == WHOLE for window in layer_reaches(config))
    return sees_all and key_sources(config) == list(range(config.num_hidden_layers))


class CudaGraphPasses:
    """The recorded passes of a model for the text that it read last."""

    def __init__(self, run: Run, *, dtype: torch.dtype) -> None:
        """`run` is the model's pass, which returns last hidden states [b, h] of each text's rows."""
        self._run, self._dtype = run, dtype
        self._passes: dict[int, _StaticPass] = {}  # by their rows
        self._keys: Tensor | None = None  # the first layer's, in which the passes were recorded
        self._graphs: CudaGraphs  # of these passes

    def take(self, parts: Sequence[PassRows]) -> bool:
        """Return whether these are few rows, of one text that has rows already."""
        (first, *others) = parts
        is_plain = first.previous is None and first.seen is None
        return not others and is_plain and first.count <= ROWS[-1] and first.cache.length > 0

    def read(self, rows: PassRows) -> Tensor:
        """Append rows to their text, and return their last hidden states [n, h]."""
        layers, start = rows.cache.layers, rows.cache.length
        for layer in layers:
            layer.reserve(start + rows.count + 1)  # one for the padding
        if layers[0].storage[0] is not self._keys:
            self._passes.clear()
            self._keys = layers[0].storage[0]
            self._graphs = CudaGraphs(self._keys.device)
        count = next(count for count in ROWS if count >= rows.count)
        if count not in self._passes:
            self._passes[count] = _StaticPass(self._run, layers, count, dtype=self._dtype, graphs=self._graphs)
        hidden = self._passes[count](rows, start)
        for layer in layers:
            layer.length = start + rows.count
        return hidden


class _StaticPass:
    """A pass of b rows over the places of one cache."""

    def __init__(
        self, run: Run, layers: Sequence[LayerCache], count: int, *, dtype: torch.dtype, graphs: CudaGraphs
    ) -> None:
        keys, _ = layers[0].storage
        self._capacity, device = keys.shape[2], keys.device
        self._ids = torch.zeros(count, dtype=torch.long, device=device)
        self._places = torch.full_like(self._ids, self._capacity - 1)  # of the rows
        positions = torch.zeros(self._capacity, dtype=torch.long, device=device)  # all keys are in the tail
        self._positions = positions[self._capacity - count :]
        self._mask = torch.zeros(count, self._capacity, dtype=dtype, device=device)
        padded = PassRows(
            cache=_WrittenText(layers, self._places), ids=self._ids, positions=positions, visible=self._mask
        )
        every_place = SeenKeys(first=0, shared=0, tail=0, end=self._capacity)
        span = Span(padded, 0, count, {(every_place, WHOLE): self._mask})
        self._read = graphs.record(lambda: run([padded], [[span]])[0])

    def __call__(self, rows: PassRows, start: int) -> Tensor:
        """Return the last hidden states [n, h] of rows whose first one goes to place `start`."""
        count, end = rows.count, start + rows.count
        self._ids[:count] = rows.ids
        self._positions[:count] = rows.row_positions
        self._places.fill_(self._capacity - 1)
        self._places[:count] = torch.arange(start, end, device=self._places.device)
        visible = rows.visible
        if visible is None:
            visible = torch.ones(count, count, dtype=torch.bool, device=self._mask.device).tril()
        seen_by_all = end - visible.shape[1]
        self._mask.fill_(torch.finfo(self._mask.dtype).min)
        self._mask[:count, :seen_by_all] = 0
        self._mask[:count, seen_by_all:end].masked_fill_(visible, 0)
        return self._read()[:count].clone()  # the next pass of this size writes there


class _WrittenText(TextCache):
    """A text's storage, in which rows are written to given places [b], and all places are seen."""

    def __init__(self, layers: Sequence[LayerCache], places: Tensor) -> None:
        super().__init__(0)
        self.layers = [_WrittenLayer(layer, places) for layer in layers]


class _WrittenLayer(LayerCache):
    def __init__(self, layer: LayerCache, places: Tensor) -> None:
        super().__init__()
        self._keys, self._values = layer.storage
        self._places = places

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write rows [1, heads, b, head_dim] to their places, and return all places."""
        for all_rows, rows in zip(self.storage, (keys, values), strict=True):
            all_rows.index_copy_(2, self._places, rows)
        return self.storage
