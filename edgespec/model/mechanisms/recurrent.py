"""Recurrent functions text by text: each text's rows continue its own state, and nodes of a tree that of their parents.

Mixers of recurrent layers work row by row, except in a few functions of their modules. A record replaces one of these
by ours, which reads each text's rows separately; outside a pass of ours, transformers' own runs.

A function has two forms. Rows of a tree, and the last ones of a text, are computed all at once from the state and leave
it as it is. Rows of a long text pass through transformers' own function (`plain`) from state to state.

The order of sums depends on how many rows lie open, and so on the trees. Where a tree's row is to have the bits of
plain decoding, memories are computed in float64, and the order does not show in what is rounded from them. Legend: n
rows of all texts, m of one, r open rows (after the state).
"""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from edgespec.model.mechanisms.mechanism import Mechanism, ModelParts, Uninstall, family_modules, family_names
from edgespec.model.mechanisms.state_cache import OPEN_ROWS, Fold, Rows, StateCache, StateRows
from edgespec.model.pass_cache import in_passes, mixer_under_way
from edgespec.model.pass_rows import Span
from edgespec.model.text_cache import TextCache

KEYLESS = frozenset({"linear_attention", "conv"})
KINDS = KEYLESS | {"hybrid", "hybrid_sliding"}  # which have keys and values, too
NUM_ROW_COPIES = 6  # of a row's inputs, keys and values while they pass a mixer

Plain = Callable[..., Any]


class Form(Protocol):
    """A recurrent function at rows of one text."""

    @property
    def fold(self) -> Fold:
        """The function that takes the first rows after a state into it."""

    @property
    def rows_at_once(self) -> int:
        """The number of rows that a state takes in at once: it stands behind a multiple of it."""

    def initial(self) -> Tensor:
        """Return the state before a text."""

    def through(self, count: int, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs [count, ...] of the first rows, each the child of the one before, and the state after."""

    def beside(self, first: int, held: StateRows, visible: Tensor) -> tuple[Tensor, Rows]:
        """Return the outputs [m - first, ...] of the rows from `first` on, and their parts for the cache.

        `visible` [m - first, r + m - first] marks the rows that each of them sees, among the rows after the state and
        the new ones.
        """


class RecurrentFunction(Mechanism):
    """A function of mixers that carries a state from row to row, and ours in its place."""

    kinds = KINDS
    keyless_kinds = KEYLESS
    keeps_states = is_unflagged = True
    function: ClassVar[str]  # its name in the modules of families

    @staticmethod
    def rows(plain: Plain, spans: Sequence[Span], *arguments: Any, **named: Any) -> Any:
        """Return what the function returns for all texts' rows, each of which continues its own state."""
        raise NotImplementedError

    def is_read(self, config: PretrainedConfig) -> bool:
        """Return whether the family's mixers call it."""
        return self.has_layers(config) and self.function in family_names(config)

    def install(self, parts: ModelParts) -> Uninstall:
        """Let the mixers of these layers call our function; what is replaced once in a module stays."""
        silence_missing_kernels()
        for kind in {type(module) for module in parts.layers.modules()}:
            for names in family_modules(kind):
                plain = names.get(self.function)
                if plain is not None and not hasattr(plain, "is_edgespecs"):
                    own = names[self.function] = in_passes(plain, functools.partial(self.rows, plain))
                    own.is_edgespecs = True  # type: ignore[attr-defined]
        return lambda: None


def silence_missing_kernels() -> None:
    """Silence transformers' messages about missing kernels, which trees do not use."""
    logging.getLogger("transformers.integrations.hub_kernels").setLevel(logging.ERROR)


def of_texts(spans: Sequence[Span], whole: Tensor) -> tuple[Tensor, ...]:
    """Return each text's rows of a tensor [1, n, ...]."""
    parts: tuple[Tensor, ...] = whole[0].split([span.count for span in spans])
    return parts


def causal_mask(num_rows: int, num_keys: int, *, device: torch.device) -> Tensor:
    """Return which of the keys each of the last rows sees: [rows, keys] bool."""
    keys = torch.arange(num_keys, device=device)
    return keys <= keys[num_keys - num_rows :, None]


def read_rows(spans: Sequence[Span], forms: Sequence[Form]) -> Tensor:
    """Return the outputs [1, n, ...] of all texts' rows, and append them to their caches."""
    return torch.cat([_outputs(span, form) for span, form in zip(spans, forms, strict=True)])[None]


def state_cache(
    text: TextCache, layer: int, number: int, kind: str, *, fold: Fold, initial: Callable[[], Tensor]
) -> StateCache:
    """Return what a layer's mixer of this number keeps of a text for this kind of function."""
    cache = text.state(f"state.{layer}.{number}.{kind}", lambda: StateCache(initial(), fold))
    cache.fold = fold  # one that a file has gets it here
    return cache


def _outputs(span: Span, form: Form) -> Tensor:
    """Return the outputs [m, ...] of one text's rows, and append the rows to its cache."""
    text = span.rows.cache
    layer, number = mixer_under_way.get()
    cache = state_cache(text, layer, number, type(form).__name__, fold=form.fold, initial=form.initial)
    held = cache.at(len(text.ids), rows_at_once=form.rows_at_once)
    num_text = len(text.ids) - held.start  # open rows that are text already
    found, first = [], 0
    if span.rows.visible is None and span.count + held.num_open > 2 * OPEN_ROWS:
        held = cache.fold_open()
        first = span.count - OPEN_ROWS if span.count > 2 * OPEN_ROWS else 0
        if first:
            out, state = form.through(first, held.state)
            held = cache.advance(first, state)
            found.append(out)
    num_rows = span.count - first
    num_seen = held.num_open + num_rows
    if span.rows.visible is None:
        visible = causal_mask(num_rows, num_seen, device=held.state.device)
    else:
        visible = span.rows.visible[span.first : span.end, : num_seen - num_text]
        visible = torch.nn.functional.pad(visible, (num_text, 0), value=True)
    out, rows = form.beside(first, held, visible)
    cache.append(rows)
    return torch.cat([*found, out])


def convolution_of(mixer: nn.Module) -> nn.Conv1d | None:
    """Return the convolution in front of a mixer's memory; None where it is no mixer."""
    found = getattr(mixer, "conv1d", None) or getattr(mixer, "conv", None)
    return found if isinstance(found, nn.Conv1d) else None
