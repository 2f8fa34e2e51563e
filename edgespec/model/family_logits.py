"""A family's own logits of last hidden states: some families scale or cap the outputs of the language model head.

Legend: k rows, h hidden size, g tokens of some ranges.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from offload.text_part import decoder_layers


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """Return the part of the model whose output is the last hidden states."""
    return model.get_submodule(decoder_layers(model)[0].rpartition(".")[0])


def family_logits(
    model: PreTrainedModel, decoder: nn.Module, hidden: Tensor, tokens: list[slice] | None = None
) -> Tensor:
    """Return logits [k, vocab] of last hidden states [k, h], or [k, g] of some ranges of tokens; gradients pass.

    The model's own forward computes them; its `decoder` returns `hidden` meanwhile.
    """
    if tokens is not None:
        head: Any = model.get_output_embeddings()
        part = functools.partial(_partial_head, head, tokens)
        found: Tensor = with_forward(head, part, lambda: family_logits(model, decoder, hidden))
        return found
    output: Any = with_forward(
        decoder,
        lambda *_, **__: _DecoderOutput(hidden[None]),
        lambda: model(input_ids=_no_ids(hidden.device), use_cache=False),
    )
    logits: Tensor = output.logits
    return logits[0]


@functools.lru_cache
def _no_ids(device: torch.device) -> Tensor:
    """Return the ids for a forward whose decoder is replaced; they are made once, because every step needs logits."""
    return torch.zeros(1, 1, dtype=torch.long, device=device)


class _DecoderOutput:
    """A decoder's output with the last hidden states alone: as attribute, first item, and mapping."""

    def __init__(self, last_hidden_state: Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getitem__(self, _key: int | str) -> Tensor:
        return self.last_hidden_state

    def keys(self) -> list[str]:
        return ["last_hidden_state"]

    def __getattr__(self, _name: str) -> None:
        return None


def with_forward(module: nn.Module, forward: Callable[..., Any], call: Callable[[], Any]) -> Any:
    """Return the result of a call during which the module has another forward.

    No function is called between the changes: an interrupt there would leave the wrong forward in place.
    """
    names = vars(module)
    own = names.get("forward")  # a wrapper, if there is one
    try:
        names["forward"] = forward
        return call()
    finally:
        if own is not None:
            names["forward"] = own
        elif "forward" in names:
            del names["forward"]


def _partial_head(head: Any, tokens: list[slice], hidden: Tensor) -> Tensor:
    """Return the outputs [..., g] of a linear head for some ranges of tokens; its weight is viewed, not copied.

    Rows of a packed one are unpacked.
    """
    bias = getattr(head, "bias", None)
    rows_of = vars(head).get("weight_rows", head.weight.__getitem__)
    parts = [nn.functional.linear(hidden, rows_of(which), None if bias is None else bias[which]) for which in tokens]
    return torch.cat(parts, -1)
