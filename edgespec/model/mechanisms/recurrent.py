"""Recurrent functions text by text: each text's rows continue its own state, and nodes of a tree that of their parents.

Mixers of recurrent layers work row by row, except in a few functions of their modules. `use_own_functions` replaces
these by ours, which read each text's rows separately; outside a pass of ours, transformers' own run. Legend: n rows
of all texts, m of one, c channels, w taps, g heads of keys, h heads of values, k and v their dimensions.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from edgespec.model.mechanisms.recurrent_forms import Convolution, DeltaRule, Form, Mamba2, Plain
from edgespec.model.mechanisms.state_cache import OPEN_ROWS, StateCache
from edgespec.model.pass_cache import mixer_under_way, spans_under_way
from edgespec.model.pass_rows import Span


def use_own_functions(layers: nn.ModuleList) -> None:
    """Let the recurrent mixers of these layers call our functions while a pass of ours runs."""
    silence_missing_kernels()
    for name in {type(module).__module__ for module in layers.modules()}:
        names = sys.modules[name].__dict__
        for function, own in OWN.items():
            plain = names.get(function)
            if plain is not None and not hasattr(plain, "is_edgespecs"):
                names[function] = _for_passes(plain, own)


def silence_missing_kernels() -> None:
    """Silence transformers' messages about missing kernels, which trees do not use."""
    logging.getLogger("transformers.integrations.hub_kernels").setLevel(logging.ERROR)


def _for_passes(plain: Plain, own: Callable[..., Any]) -> Plain:
    @functools.wraps(plain)
    def function(*arguments: Any, **named: Any) -> Any:
        spans = spans_under_way.get()
        return plain(*arguments, **named) if spans is None else own(plain, spans, *arguments, **named)

    function.is_edgespecs = True  # type: ignore[attr-defined]
    return function


def _convolution(
    plain: Plain,
    spans: Sequence[Span],
    hidden_states: Tensor,  # [1, c, n]
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """Return the convolved rows [1, c, n]."""
    forms = [
        Convolution(plain=plain, inputs=part, weight=weight, bias=bias, activation=activation)
        for part in _of_texts(spans, hidden_states.mT)
    ]
    return read_rows(spans, forms).mT


def _delta_rule(
    plain: Plain,
    spans: Sequence[Span],
    query: Tensor,  # [1, n, g, k]
    key: Tensor,  # [1, n, g, k]
    value: Tensor,  # [1, n, h, v]
    g: Tensor,  # [1, n, h]
    beta: Tensor,  # [1, n, h]
    **options: Any,
) -> tuple[Tensor, None]:
    """Return the rows' outputs [1, n, h, v]; their states stay with the texts."""
    parts = zip(*(_of_texts(spans, whole) for whole in (query, key, value, g, beta)), strict=True)
    forms = [
        DeltaRule(plain=plain, queries=queries, keys=keys, inputs=inputs, decays=decays, rates=rates, options=options)
        for queries, keys, inputs, decays, rates in parts
    ]
    return read_rows(spans, forms), None


def _mamba2(
    plain: Plain,
    spans: Sequence[Span],
    hidden_states: Tensor,  # [1, n, h, v]
    dt: Tensor,  # [1, n, h]
    A: Tensor,  # [h]  # noqa: N803
    B: Tensor,  # [1, n, g, k]  # noqa: N803
    C: Tensor,  # [1, n, g, k]  # noqa: N803
    **options: Any,
) -> Any:
    """Return the rows' outputs [1, n, h, v]; their states stay with the texts."""
    parts = zip(*(_of_texts(spans, whole) for whole in (hidden_states, dt, B, C)), strict=True)
    forms = [
        Mamba2(plain=plain, inputs=inputs, steps=steps, rates=A, keys=keys, queries=queries, options=options)
        for inputs, steps, keys, queries in parts
    ]
    found = read_rows(spans, forms)
    return (found, None) if options.get("return_final_states", False) else found


OWN: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "mamba2_chunk_scan": _mamba2,
}


def _of_texts(spans: Sequence[Span], whole: Tensor) -> tuple[Tensor, ...]:
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


def _outputs(span: Span, form: Form) -> Tensor:
    """Return the outputs [m, ...] of one text's rows, and append the rows to its cache."""
    text = span.rows.cache
    layer, number = mixer_under_way.get()
    name = f"state.{layer}.{number}.{type(form).__name__}"
    cache = text.state(name, lambda: StateCache(form.initial(), form.fold))
    cache.fold = form.fold  # one that a file has gets it here
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
