"""Embeddings of n-grams in the layers of Qwen 4, which mix the tokens before a row: each row's are those of its path.

Such a layer looks up a few rows of a table by a row's token and those before it, and convolves what it makes of them
with gaps. transformers keeps both in its cache as it does convolutions' inputs; here both are states of the text, as
those of recurrent layers. Outside a pass of ours, transformers' own forward runs. Legend: n rows of all texts, c
channels, w tokens of an n-gram.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PretrainedConfig
from transformers.activations import ACT2FN

from edgespec.model.mechanisms.mechanism import Mechanism, ModelParts, Uninstall, parts_of, wrap_forwards
from edgespec.model.mechanisms.recurrent import read_rows
from edgespec.model.mechanisms.short_convolution import Convolution, fold_inputs, last_inputs
from edgespec.model.mechanisms.state_cache import OPEN_ROWS, Rows, StateRows
from edgespec.model.pass_cache import in_passes, mixer_under_way
from edgespec.model.pass_rows import Span

SMALL_WIDTH = 4  # of a head's embedding, in a narrow copy
CONVOLUTION_STATE, TOKENS_STATE = 1, 2  # their numbers among the states of a layer


class Ngrams(Mechanism):
    """The last tokens before a row, and the inputs of the convolution behind its n-grams."""

    keeps_states = True
    small_sizes: ClassVar = {"ngram_vocab_size_base": 96, "split_ngram_parts": 1}  # rows of a table; its parts in files

    def has_layers(self, config: PretrainedConfig) -> bool:
        """Return whether some layer has tables of n-grams."""
        return bool(getattr(config, "ple_layer_ids", None))

    def install(self, parts: ModelParts) -> Uninstall:
        """Let the n-grams of these layers go by paths."""
        modules: list[Any] = list(parts.layers.modules())
        mixers = [module for module in modules if {"ple_embedding", "conv1d"} <= parts_of(type(module))]
        for mixer in mixers:
            mixer._short_conv = in_passes(mixer._short_conv, functools.partial(_convolved, mixer))
        give_back = wrap_forwards(
            [mixer.ple_embedding for mixer in mixers],
            lambda table: in_passes(table.forward, functools.partial(_embedded, table, table.forward)),
        )

        def give_all_back() -> None:
            give_back()
            for mixer in mixers:
                mixer.__dict__.pop("_short_conv", None)

        return give_all_back

    def layer_facts(self, config: PretrainedConfig, layer: int) -> object:
        """Return whether a layer has n-grams: they are counted from 1."""
        return layer + 1 in (getattr(config, "ple_layer_ids", None) or [])

    def kept_layers(self, config: PretrainedConfig, layers: Sequence[int]) -> dict[str, Any]:
        """Return which of the layers have n-grams."""
        if not self.has_layers(config):
            return {}
        return {"ple_layer_ids": [place + 1 for place, layer in enumerate(layers) if self.layer_facts(config, layer)]}

    def narrow(self, config: PretrainedConfig, hidden_size: int) -> dict[str, Any]:
        """Return a narrow table for each head of each n-gram."""
        if not getattr(config, "ple_embed_dim", None):
            return {}
        return {"ple_embed_dim": (config.ngram_size - 1) * config.heads_per_ngram * SMALL_WIDTH}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensBefore:
    """The tokens before each row: outputs [m, w - 1]. The state is those before the rows after it, [w - 1, 1]."""

    ids: Tensor  # [m, 1]
    width: int  # w, of a row's own token and those before it
    padding: int  # the token before a text

    fold = staticmethod(fold_inputs)
    rows_at_once = OPEN_ROWS

    def initial(self) -> Tensor:
        """Return the padding."""
        return torch.full_like(self.ids[:1], self.padding).expand(self.width - 1, 1).clone()

    def through(self, count: int, state: Tensor) -> tuple[Tensor, Tensor]:
        """Look back along the text."""
        ids = torch.cat([state, self.ids[:count]])
        return ids[:-1, 0].unfold(0, self.width - 1, 1), ids[count:].clone()

    def beside(self, first: int, held: StateRows, visible: Tensor) -> tuple[Tensor, Rows]:
        """Look back along each row's path."""
        new = self.ids[first:]
        return last_inputs(held, new, visible)[:, :-1, 0], (new,)


class _Before:
    """The cache of a batch of rows: the tokens before each."""

    def __init__(self, tokens: Tensor) -> None:
        self._tokens = tokens  # [n, w - 1]

    def get_conv_state(self, _layer: int, **_: Any) -> Tensor:
        return self._tokens

    def update_conv_state(self, states: Tensor, _layer: int, **_: Any) -> Tensor:
        return states


def _embedded(
    module: Any, plain: Callable[..., Tensor], spans: Sequence[Span], input_ids: Tensor, *_: Any, **__: Any
) -> Tensor:
    """Return the embeddings [1, n, c] of rows [1, n]: to transformers' code, each is the next one of a text."""
    mixer_under_way.set((module.layer_idx, TOKENS_STATE))
    forms = [
        TokensBefore(ids=ids[:, None], width=module.ngram_size, padding=module.eos_token_id)
        for ids in input_ids[0].split([span.count for span in spans])
    ]
    before = read_rows(spans, forms)[0]
    return plain(input_ids.T, _Before(before)).transpose(0, 1)


def _convolved(module: Any, spans: Sequence[Span], hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    """Return the convolved rows [1, n, c]."""
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
