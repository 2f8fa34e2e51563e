"""Embeddings of n-grams in the layers of Qwen 4, which mix the tokens before a row: each row's are those of its path.

Such a layer looks up a few rows of a table by a row's token and those before it, and convolves what it makes of them
with gaps. transformers keeps both in its cache as it does convolutions' inputs; here both are states of the text, as
those of recurrent layers. Outside a pass of ours, transformers' own forward runs. Legend: n rows of all texts, c
channels, w tokens of an n-gram.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.activations import ACT2FN

from edgespec.model.mechanisms.recurrent import read_rows
from edgespec.model.mechanisms.recurrent_forms import Convolution, TokensBefore
from edgespec.model.pass_cache import mixer_under_way, spans_under_way

EMBEDDING, MIXER = "Qwen4ExpTextNGramEmbedding", "Qwen4ExpTextPLELayer"  # classes of transformers
CONVOLUTION_STATE, TOKENS_STATE = 1, 2  # their numbers among the states of a layer


def use_own_ngrams(layers: nn.ModuleList) -> None:
    """Let the n-grams of these layers go by paths while a pass of ours runs."""
    modules: list[Any] = list(layers.modules())
    for module in modules:
        if type(module).__name__ == EMBEDDING:
            module.forward = functools.partial(_embedded, module, module.forward)
        elif type(module).__name__ == MIXER:
            module._short_conv = functools.partial(_convolved, module, module._short_conv)


def use_plain_ngrams(layers: nn.ModuleList) -> None:
    """Give these modules their own functions again: a wrapped one refers to its module, and keeps it alive."""
    for module in layers.modules():
        if type(module).__name__ in (EMBEDDING, MIXER):
            module.__dict__.pop("forward", None)
            module.__dict__.pop("_short_conv", None)


class _Before:
    """The cache of a batch of rows: the tokens before each."""

    def __init__(self, tokens: Tensor) -> None:
        self._tokens = tokens  # [n, w - 1]

    def get_conv_state(self, _layer: int, **_: Any) -> Tensor:
        return self._tokens

    def update_conv_state(self, states: Tensor, _layer: int, **_: Any) -> Tensor:
        return states


def _embedded(module: Any, plain: Callable[..., Tensor], input_ids: Tensor, *others: Any, **named: Any) -> Tensor:
    """Return the embeddings [1, n, c] of rows [1, n]: to transformers' code, each is the next one of a text."""
    spans = spans_under_way.get()
    if spans is None:
        return plain(input_ids, *others, **named)
    mixer_under_way.set((module.layer_idx, TOKENS_STATE))
    forms = [
        TokensBefore(ids=ids[:, None], width=module.ngram_size, padding=module.eos_token_id)
        for ids in input_ids[0].split([span.count for span in spans])
    ]
    before = read_rows(spans, forms)[0]
    return plain(input_ids.T, _Before(before)).transpose(0, 1)


def _convolved(module: Any, plain: Callable[..., Tensor], hidden_states: Tensor, *others: Any, **named: Any) -> Tensor:
    """Return the convolved rows [1, n, c]."""
    spans = spans_under_way.get()
    if spans is None:
        return plain(hidden_states, *others, **named)
    mixer_under_way.set((module.layer_idx, CONVOLUTION_STATE))
    convolution: nn.Conv1d = module.conv1d
    forms = [
        Convolution(
            plain=functools.partial(_with_gaps, convolution.dilation[0]), inputs=inputs,
            weight=convolution.weight[:, 0], bias=convolution.bias, activation="silu",
            dilation=convolution.dilation[0],
        )
        for inputs in hidden_states[0].split([span.count for span in spans])
    ]  # fmt: skip
    return read_rows(spans, forms)


def _with_gaps(dilation: int, inputs: Tensor, weight: Tensor, bias: Tensor | None, *, activation: str) -> Tensor:
    """Return the convolution of each channel of inputs [1, c, n] by weights [c, taps], with gaps between these."""
    channels, taps = weight.shape
    padded = pad(inputs, ((taps - 1) * dilation, 0))
    out = torch.conv1d(padded, weight[:, None], bias, dilation=dilation, groups=channels)
    found: Tensor = ACT2FN[activation](out)
    return found
