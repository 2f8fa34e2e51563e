"""One layer's keys and values of one text, in memory that grows in steps."""

from collections.abc import Iterator
from typing import Self

from torch import Tensor
from transformers import PretrainedConfig

from edgespec.model.mechanisms.mechanism import KeyShape, Mechanism

STEP_ROWS = 128  # that memory grows by at least
STEP_SHARE = 16  # and by this part of itself, so that long texts are copied seldom


class LayerCache:
    """One layer's keys and values: [1, heads, capacity, head_dim], the first `length` rows in use.

    Sliding-window layers keep all rows, too: the window is in the mask, by position, because the rows of a tree are
    not in the order of their positions.
    """

    def __init__(self, step_rows: int = STEP_ROWS) -> None:
        """Memory grows in multiples of `step_rows`."""
        self.length = 0
        self._step_rows = step_rows
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._addresses: tuple[int, int, int] | None = None  # until memory is moved

    @property
    def capacity(self) -> int:
        """The number of rows that fit."""
        return 0 if self._keys is None else self._keys.shape[2]

    @property
    def storage(self) -> tuple[Tensor, Tensor]:
        """All keys and values, those not in use included; growth replaces both tensors."""
        assert self._keys is not None
        assert self._values is not None
        return self._keys, self._values

    @property
    def addresses(self) -> tuple[int, int, int]:
        """Where keys and values lie, and the capacity, for code that is no tensor operation."""
        if self._addresses is None:
            keys, values = self.storage
            self._addresses = keys.data_ptr(), values.data_ptr(), keys.shape[2]
        return self._addresses

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append rows [1, heads, n, head_dim], and return all rows in use."""
        end = self.length + keys.shape[2]
        if self._keys is None or self._values is None:
            self._keys, self._values = keys[:, :, :0], values[:, :, :0]
        self.reserve(end)
        self._keys[:, :, self.length : end] = keys
        self._values[:, :, self.length : end] = values
        self.length = end
        return self._keys[:, :, :end], self._values[:, :, :end]

    def reserve(self, rows: int) -> None:
        """Allocate memory for `rows` rows in all; the cache must have had some."""
        if rows > self.capacity:
            rows = max(rows, self.capacity + max(self._step_rows, self.capacity // STEP_SHARE))
            rows = -(-rows // self._step_rows) * self._step_rows
            self._keys, self._values = (self._resized(old, rows) for old in self.storage)
            self._addresses = None

    @property
    def num_bytes(self) -> int:
        """The memory of keys and values, those not in use included."""
        return sum(part.nbytes for part in (self._keys, self._values) if part is not None)

    def keep(self, committed: int, rows: Tensor, *, num_in_place: int = 0) -> None:
        """Move `rows` [j], counted from the cache's start, after the first `committed` ones; drop the rest.

        The first `num_in_place` of them lie there.
        """
        self.length = committed + rows.shape[0]
        if num_in_place < rows.shape[0] and self._keys is not None and self._values is not None:
            moved, places = rows[num_in_place:], slice(committed + num_in_place, self.length)
            # index_select copies first, so that source and destination may overlap.
            self._keys[:, :, places] = self._keys.index_select(2, moved)
            self._values[:, :, places] = self._values.index_select(2, moved)

    def rows(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the first `count` rows, for another layer that reads them."""
        keys, values = self.storage
        return keys[:, :, :count], values[:, :, :count]

    def truncate(self, rows: int) -> None:
        """Drop the rows after the first `rows`."""
        self.length = min(self.length, rows)

    def copy(self, rows: int) -> Self:
        """Return a copy of the first `rows` rows."""
        other = type(self)(self._step_rows)
        if self._keys is not None and self._values is not None and rows:
            other.append(self._keys[:, :, :rows], self._values[:, :, :rows])
        return other

    def _resized(self, old: Tensor, rows: int) -> Tensor:
        _, heads, _, head_dim = old.shape
        new = old.new_zeros(1, heads, rows, head_dim)  # zeros: a static pass multiplies the unused rows by 0
        new[:, :, : self.length] = old[:, :, : self.length]
        return new


class IndexKeys(LayerCache):
    """What every row keeps beside its keys: [n, width], for an index to choose by, or to make the keys of groups of."""

    def append_rows(self, keys: Tensor) -> Tensor:
        """Append keys [n, width], and return all of them in use."""
        return self.append(keys[None, None], keys[None, None, :, :0])[0][0, 0]

    def tensors(self, count: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the first `count` rows: the state has no parts with names of their own."""
        yield "", self.rows(count)[0][0, 0]


class KeysValues(Mechanism):
    """Keys and values, a row of each for every row of the text."""

    kinds = frozenset({"full_attention", "mlp", "moe"})
    keyless_kinds = frozenset({"mlp", "moe"})
    is_static = True

    def is_text_by_text(self, config: PretrainedConfig) -> bool:
        """Return whether layers call attention twice, with the same keys."""
        return config.model_type == "diffllama"

    def key_shape(self, config: PretrainedConfig, layer: int) -> KeyShape:
        """Return the shape of keys and values, both of which are kept for each head of keys."""
        of = config.per_layer_config[layer]
        width = (
            getattr(of, "head_dim", None)
            or getattr(of, "kv_channels", None)
            or of.hidden_size // of.num_attention_heads
        )
        value_width = getattr(of, "v_head_dim", None) or width
        return KeyShape(heads=_num_heads(of, layer), key_width=width, value_width=value_width)


def _num_heads(config: PretrainedConfig, layer: int) -> int:
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        return 1  # the older Falcon models
    heads = int(
        getattr(config, "num_key_value_heads", None)
        or getattr(config, "num_kv_heads", None)
        or config.num_attention_heads
    )
    if config.model_type == "jetmoe":
        return heads * int(config.num_experts_per_tok)  # repeated for each expert of attention
    if config.model_type == "mimo_v2_flash" and config.layer_types[layer] == "sliding_attention":
        return 2 * heads
    return heads


def rows_held(rows: int, step_rows: int = STEP_ROWS) -> int:
    """Return the most rows that are allocated for a text of `rows` rows."""
    return rows + rows // STEP_SHARE + step_rows
