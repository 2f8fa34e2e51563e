"""Keys and values of the committed text, with room for a tree behind them.

The cache is a preallocated transformers cache: a forward appends rows, `keep` moves the rows of an accepted
path down to the committed end and forgets the others. Rows carry a batch dimension throughout.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class TreeCacheLayer(CacheLayerMixin):
    """One layer's keys and values: [batch, heads, capacity, head_dim], the first `length` rows in use.

    Sliding-window layers have their full length too: the window is in the mask, by position, because the
    rows of a tree are not in the order of their positions.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(self, capacity: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.capacity = capacity
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the rows once, when the first forward shows the shapes."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = self._allocate(key_states)
        self.values = self._allocate(value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append rows, and return all rows in use."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[-2]
        if end > self.capacity:
            self._grow(end)
        assert self.keys is not None
        assert self.values is not None
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def _allocate(self, states: Tensor) -> Tensor:
        batch, heads, _, head_dim = states.shape
        return states.new_empty(batch, heads, self.capacity, head_dim)

    def reserve(self, rows: int) -> None:
        """Make room for `rows` in all; what is in use stays."""
        if rows > self.capacity and self.is_initialized:
            self._resize(rows)
        self.capacity = max(rows, self.capacity)

    def _grow(self, rows: int) -> None:
        """Make room for at least `rows`: rare, for trees that draw far more nodes than they keep."""
        self._resize(max(rows, self.capacity * 3 // 2))

    def _resize(self, capacity: int) -> None:
        assert self.keys is not None
        assert self.values is not None
        self.capacity = capacity
        old_keys, old_values = self.keys[:, :, : self.length], self.values[:, :, : self.length]
        self.keys, self.values = self._allocate(old_keys), self._allocate(old_values)
        self.keys[:, :, : self.length] = old_keys
        self.values[:, :, : self.length] = old_values

    def keep(self, committed: int, rows: Tensor) -> None:
        """Move `rows` [j], counted from the cache's start, behind the first `committed` ones; drop the rest."""
        end = committed + rows.shape[0]
        if self.keys is not None and self.values is not None and rows.shape[0]:
            # index_select copies first, so that source and destination may overlap.
            self.keys[:, :, committed:end] = self.keys.index_select(2, rows)
            self.values[:, :, committed:end] = self.values.index_select(2, rows)
        self.length = end

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the key length and the offset for a mask over `query_length` new rows."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Return the number of rows in use."""
        return self.length

    def get_max_length(self) -> int:
        """Return the number of rows that fit."""
        return self.capacity

    def crop(self, tokens_to_remove: int) -> None:
        """Remove so many rows; transformers gives the count as zero or a negative number."""
        assert tokens_to_remove <= 0, "positive counts meant something else in earlier releases"
        self.length = max(0, self.length + tokens_to_remove)

    def reset(self) -> None:
        """Forget all rows; the memory stays."""
        self.length = 0


class TreeCache(Cache):
    """Keys and values of all layers."""

    def __init__(self, num_layers: int, capacity: int) -> None:
        self.tree_layers = [TreeCacheLayer(capacity) for _ in range(num_layers)]
        super().__init__(layers=list(self.tree_layers))
        self.capacity = capacity

    @property
    def length(self) -> int:
        """The number of rows in use, the same in every layer between forwards."""
        return self.tree_layers[0].length

    def reserve(self, rows: int) -> None:
        """Make room for `rows` in all; what is in use stays."""
        for layer in self.tree_layers:
            layer.reserve(rows)
        self.capacity = max(rows, self.capacity)

    def keep(self, committed: int, rows: Tensor) -> None:
        """Keep the first `committed` rows and then `rows` [j], in that order."""
        for layer in self.tree_layers:
            layer.keep(committed, rows)

    def truncate(self, length: int) -> None:
        """Forget the rows from `length` on, also those that an interrupted pass wrote to some of the layers."""
        for layer in self.tree_layers:
            layer.length = min(layer.length, length)
