"""Recurrent functions text by text: each text's rows continue its own state, and nodes of a tree that of their parents.

Mixers of recurrent layers work row by row but for a few functions of their modules. `use_own_functions` puts ours in
their place, which take each text's rows by themselves; outside a pass of ours they are what they were. Legend: n rows
of all texts, m of one, c channels, w taps, g heads of keys, h heads of values, k and v their dimensions.
"""

from __future__ import annotations

import functools
import logging
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from edgespec.model.attention_window import causal_mask
from edgespec.model.pass_cache import mixer_under_way, spans_under_way
from edgespec.model.pass_rows import Span
from edgespec.model.recurrent_forms import Convolution, DeltaRule, Form, Mamba2, Plain
from edgespec.model.state_cache import OPEN_ROWS


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
    """Let transformers tell nothing of kernels that are not installed, which trees do not use."""
    logging.getLogger("transformers.integrations.hub_kernels").setLevel(logging.ERROR)


def _for_passes(plain: Plain, own: Callable[..., Any]) -> Plain:
    @functools.wraps(plain)
    def function(*arguments: Any, **named: Any) -> Any:
        spans = spans_under_way()
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
    """Return what the rows read [1, n, h, v]; their states stay with the texts."""
    has_norm = options.pop("use_qk_l2norm_in_kernel", False)
    for of_states in ("initial_state", "output_final_state"):
        options.pop(of_states, None)
    parts = zip(*(_of_texts(spans, whole) for whole in (query, key, value, g, beta)), strict=True)
    forms = [
        DeltaRule(
            plain=plain,
            queries=queries,
            keys=keys,
            values=values,
            decays=decays,
            rates=rates,
            has_norm=has_norm,
            options=options,
        )
        for queries, keys, values, decays, rates in parts
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
    """Return what the rows read [1, n, h, v]; their states stay with the texts."""
    skip, step_bias = options.pop("D", None), options.pop("dt_bias", None)  # [h] each
    has_softplus, step_limit = options.pop("dt_softplus", False), options.pop("dt_limit", (0.0, math.inf))
    returns_states = options.pop("return_final_states", False)
    options.pop("initial_states", None)
    parts = zip(*(_of_texts(spans, whole) for whole in (hidden_states, dt, B, C)), strict=True)
    forms = [
        Mamba2(
            plain=plain,
            inputs=inputs,
            steps=steps,
            rates=A,
            keys=keys,
            queries=queries,
            skip=skip,
            step_bias=step_bias,
            has_softplus=has_softplus,
            step_limit=step_limit,
            options=options,
        )
        for inputs, steps, keys, queries in parts
    ]
    found = read_rows(spans, forms)
    return (found, None) if returns_states else found


OWN: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "mamba2_chunk_scan": _mamba2,
}


def _of_texts(spans: Sequence[Span], whole: Tensor) -> tuple[Tensor, ...]:
    """Return each text's rows of a tensor [1, n, ...]."""
    parts: tuple[Tensor, ...] = whole[0].split([span.count for span in spans])
    return parts


def read_rows(spans: Sequence[Span], forms: Sequence[Form]) -> Tensor:
    """Return the outputs [1, n, ...] of all texts' rows, which their caches gain."""
    return torch.cat([_outputs(span, form) for span, form in zip(spans, forms, strict=True)])[None]


def _outputs(span: Span, form: Form) -> Tensor:
    """Return the outputs [m, ...] of one text's rows, which its cache gains."""
    text = span.rows.cache
    cache = text.state((*mixer_under_way(), type(form)), form.initial, form.fold)
    held = cache.at(len(text.ids))
    found, first = [], 0
    if span.rows.visible is None and form.count + held.num_open > 2 * OPEN_ROWS:
        held = cache.fold_open()
        first = form.count - OPEN_ROWS if form.count > 2 * OPEN_ROWS else 0
        if first:
            out, state = form.through(first, held.state)
            held = cache.advance(first, state)
            found.append(out)
    num_rows = form.count - first
    num_seen = held.num_open + num_rows
    if span.rows.visible is None:
        visible = causal_mask(num_rows, num_seen, device=held.state.device)
    else:
        visible = span.rows.visible[span.first : span.end, :num_seen]
    out, rows = form.beside(first, held, visible)
    cache.append(rows)
    return torch.cat([*found, out])
