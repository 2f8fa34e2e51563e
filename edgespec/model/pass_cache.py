"""The cache that a model is given, and the facts of a running pass: whose rows pass the layer."""

import functools
import inspect
from collections.abc import Callable, Sequence
from contextvars import ContextVar, copy_context
from typing import Any, TypeVar

from torch import Tensor
from transformers.cache_utils import Cache

from edgespec.errors import EdgespecError
from edgespec.model.pass_rows import Span
from offload.adapters.use import rows_under_way, runs_of
from offload.layouts.layout import experts_stay_packed, stays_packed

Result = TypeVar("Result")

# All families' from transformers 5.24 on; before it, that of Mamba's kind, and that of all others
CACHE_ARGUMENTS = ("cache", "cache_params", "past_key_values")

# The rows that pass a layer now; None outside a pass of ours
spans_under_way: ContextVar[Sequence[Span] | None] = ContextVar("spans_under_way", default=None)
# The layer of the recurrent mixer that read its states last, and the mixer's number in it
mixer_under_way: ContextVar[tuple[int, int]] = ContextVar("mixer_under_way")


def cache_argument(forward: Callable[..., Any]) -> str:
    """Return the name of the argument of a transformers forward that takes the cache."""
    names = inspect.signature(forward).parameters
    return next((name for name in CACHE_ARGUMENTS if name in names), CACHE_ARGUMENTS[-1])


def attended(spans: Sequence[Span] | None, call: Callable[[], Result]) -> Result:
    """Return the result of a call whose attention and recurrent functions read these rows; None: transformers' own.

    The call has a context of its own: wherever an interrupt ends it, the next one does not find these rows.
    """
    context = copy_context()
    context.run(spans_under_way.set, spans)
    if spans is not None:
        context.run(rows_under_way.set, runs_of([(span.rows.cache.adapters, span.count) for span in spans]))
        context.run(stays_packed.set, all(span.stays_packed for span in spans))
        context.run(experts_stay_packed.set, spans[0].experts_stay_packed)
    return context.run(call)


def in_passes(plain: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `own` while a pass of ours runs, with its spans first, and else `plain`."""

    @functools.wraps(plain)
    def function(*arguments: Any, **named: Any) -> Any:
        spans = spans_under_way.get()
        return plain(*arguments, **named) if spans is None else own(spans, *arguments, **named)

    return function


class _UnkeptLayer:
    """A layer in which families note positions of earlier rows: none are there, and none are kept."""

    indexer_position_ids = None

    def __setattr__(self, name: str, value: Any) -> None:
        pass


class _Unkept(list[Any]):
    """No layers, of which each can be asked."""

    def __getitem__(self, _index: Any) -> Any:
        return _UnkeptLayer()


class PassCache(Cache):
    """The cache that a model is given: it hands new keys and values through to our attention.

    Families that bypass the registry, or cache latents, get all keys of the one text whose rows pass the layer.
    Recurrent mixers get no state: our functions keep it.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.layers = _Unkept()
        self.text_by_text = False

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the rows as they are, or all rows of the only text."""
        if not self.text_by_text:
            return key_states, value_states
        spans = spans_under_way.get()
        assert spans is not None
        return spans[0].rows.cache.layers[layer_idx].append(key_states, value_states)

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Return all keys [1, keys, width] by which the index of the only text's layer chooses."""
        spans = spans_under_way.get()
        assert spans is not None
        return spans[0].rows.cache.index_keys(layer_idx).append_rows(indexer_key_states[0])[None]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: positions are given."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the key length and the offset of a mask that is never read."""
        return query_length, 0

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return False."""
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return None, and note the mixer."""
        mixer_under_way.set((layer_idx, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return None, and note the mixer."""
        mixer_under_way.set((layer_idx, state_idx))

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Return the convolution's inputs as they are, and note the mixer."""
        mixer_under_way.set((layer_idx, state_idx))
        return conv_states

    def update_recurrent_state(  # type: ignore[override]
        self, recurrent_states: Tensor | None, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> None:
        """Keep nothing: our functions return no state, and keep it with its text."""
        if recurrent_states is not None:
            what = "a recurrent layer keeps a state of a kind that cannot be followed through a tree."
            raise EdgespecError("E_UNSUPPORTED_ARCHITECTURE", what, "Use another model.")
