"""What a model is given in place of a cache, and what is known while a pass runs: whose rows pass the layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

from torch import Tensor
from transformers.cache_utils import Cache

from edgespec.errors import EdgespecError
from edgespec.model.pass_rows import Span

Result = TypeVar("Result")

_spans: ContextVar[Sequence[Span] | None] = ContextVar("spans", default=None)
_mixer: ContextVar[tuple[int, int]] = ContextVar("mixer")


def spans_under_way() -> Sequence[Span] | None:
    """Return the rows that pass a layer now; None outside a pass of ours."""
    return _spans.get()


def mixer_under_way() -> tuple[int, int]:
    """Return the layer and the number in it of the recurrent mixer that asked for its states last."""
    return _mixer.get()


def enter_mixer(layer: int, number: int) -> None:
    """Note which mixer asks for its states now."""
    _mixer.set((layer, number))


def attended(spans: Sequence[Span] | None, call: Callable[[], Result]) -> Result:
    """Return what a call gives whose attention and recurrent functions are over these rows; None: transformers' own.

    No context manager: an interrupt between the calls that it is made of would leave these rows to whoever comes next.
    """
    before = _spans.get()
    try:
        _spans.set(spans)
        return call()
    finally:
        _spans.set(before)


class PassCache(Cache):
    """What a model is given in place of a cache: new keys and values go through it to our attention.

    Families that bypass the registry, or cache latents, get all keys of the text whose rows pass the layer alone.
    Recurrent mixers are told that there is no state: our functions know better.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.text_by_text = False

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the rows as they are, or all rows of the only text."""
        if not self.text_by_text:
            return key_states, value_states
        spans = _spans.get()
        assert spans is not None
        return spans[0].rows.cache.layers[layer_idx].append(key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: positions are given."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the key length and the offset for a mask, which nobody reads."""
        return query_length, 0

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return False."""
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return None, and remember who asked."""
        enter_mixer(layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return None, and remember who asked."""
        enter_mixer(layer_idx, state_idx)

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Return the convolution's inputs as they are."""
        enter_mixer(layer_idx, state_idx)
        return conv_states

    def update_recurrent_state(  # type: ignore[override]
        self, recurrent_states: Tensor | None, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> None:
        """Keep nothing: our functions return no state, and keep it with its text."""
        if recurrent_states is not None:
            raise EdgespecError(
                "E_UNSUPPORTED_ARCHITECTURE",
                "a recurrent layer keeps a state of a kind that cannot be followed through a tree.",
                "Use another model.",
            )
