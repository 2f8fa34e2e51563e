"""The network of a feature head: one decoder layer of the target's family, fed with the target's features.

Its parts lie in one transformers model of a single layer, so that masks, positions and caches are those of
any model here. All that is outside the layer (embedding, final norm, language model head) is the target's own,
lent and frozen; `fuse` makes the layer's input of a token's embedding and of the feature before it. A feature
is the last hidden state after the final norm, the input of the language model head. (EAGLE, as CORAL's section
2.2 describes it.) Legend: h the target's hidden size.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel

from edgespec.draft.head_router import HeadRouter
from edgespec.errors import EdgespecError
from edgespec.model.mechanisms.known import keeps_states
from edgespec.model.narrow_copy import keep_layers

HEAD_KEY = "edgespec_head"  # of the config.json that makes a folder a feature head
FORMAT = 1
OWN_MODULES = ("fuse", "router")  # of the head, beside its layer


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadFacts:
    """The facts that a feature head's config.json states beside the layer's own configuration."""

    target: str  # the target's name, for people
    target_fingerprint: str
    method: str  # eagle, hass, coral
    router_groups: int | None = None  # of the vocabulary; None without a router
    top_groups: int = 1  # that are computed for each node
    format: int = FORMAT


class Fuse(nn.Module):
    """Makes the layer's input [..., h] of a token's embedding [..., h] and the feature [..., h] before it."""

    def __init__(self, hidden_size: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * hidden_size, hidden_size, dtype=dtype)

    def forward(self, embedded: Tensor, previous: Tensor) -> Tensor:
        """Return the layer's input, from the embedding and the feature side by side."""
        inputs: Tensor = self.linear(torch.cat([embedded, previous.to(embedded.dtype)], -1))
        return inputs


def head_config(target: PretrainedConfig) -> PretrainedConfig:
    """Return a configuration of one layer like the target's, with full attention where the family has two kinds.

    Raises EdgespecError where such a layer would be recurrent, since its training reads a cache of keys and values, and
    where a family that sees has no model of its words alone.
    """
    config = copy.deepcopy(target.get_text_config(decoder=True))
    if type(config) is not type(target) and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise EdgespecError(
            "E_UNSUPPORTED_ARCHITECTURE",
            f"a head of '{target.model_type}' would be one of '{config.model_type}', of which there is no model alone.",
            "Train an EAGLE-3 head (eagle3), whose layer is Llama's.",
        )
    config.__dict__.pop("quantization_config", None)
    kinds = getattr(config, "layer_types", None)
    layer = kinds.index("full_attention") if kinds and "full_attention" in kinds else 0
    keep_layers(config, [layer])
    if keeps_states(config):
        raise EdgespecError(
            "E_UNSUPPORTED_ARCHITECTURE",
            f"a head of '{config.model_type}' would be a recurrent layer, which cannot be trained as a head.",
            "Use a language model as draft.",
        )
    return config


def attach_head_parts(model: PreTrainedModel, facts: HeadFacts) -> None:
    """Give a one-layer model the modules that make it a head, on the meta device."""
    config = model.config.get_text_config(decoder=True)
    hidden_size, dtype = int(config.hidden_size), model.dtype
    with torch.device("meta"):
        model.fuse = Fuse(hidden_size, dtype=dtype)
        if facts.router_groups is not None:
            model.router = HeadRouter(hidden_size, facts.router_groups, top_groups=facts.top_groups).to(dtype)
    model.requires_grad_(False)
