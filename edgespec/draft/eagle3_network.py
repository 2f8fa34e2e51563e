"""The network of an EAGLE-3 head: a decoder layer over a token's embedding and the target's features before it.

The features are hidden states from between the target's layers, which `fc` makes one vector of the head's width. This
is done once for each row of the target's text, so that texts keep h numbers a row. Below a tree's root the head's own
output takes the vector's place. Legend: h the head's width, h_t the target's, n the number of states.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from edgespec.draft.axes_rotation import rotate_by_axes
from edgespec.draft.eagle3 import Eagle3Facts
from edgespec.draft.known_tokens_head import KnownTokensHead
from edgespec.draft.own_parts import OwnParts
from edgespec.model.aux_states import AuxStates


class Eagle3Fuse(nn.Module):
    """Makes features of the target's hidden states, and the first layer's input of an embedding and a feature."""

    def __init__(self, facts: Eagle3Facts, layers: tuple[int, ...], *, hidden_size: int, norm: Any) -> None:
        super().__init__()
        num_aux_layers, width = len(layers), facts.target_hidden_size
        if num_aux_layers:
            self.fc = nn.Linear(num_aux_layers * width, hidden_size, bias=facts.has_fc_bias)
            self.aux_states = AuxStates(layers=layers, make=self.features)
        if num_aux_layers and facts.norm_before_fc:
            self.input_norm = norm(num_aux_layers * width)
        if num_aux_layers and facts.fc_norm:
            self.fc_norm = nn.ModuleList(norm(width) for _ in range(num_aux_layers))

    def features(self, states: Tensor) -> Tensor:
        """Return the features [k, h] of the target's hidden states side by side [k, n * h_t]."""
        states = states.to(next(self.fc.parameters()).dtype)
        if hasattr(self, "input_norm"):
            states = self.input_norm(states)
        if hasattr(self, "fc_norm"):
            parts = states.chunk(len(self.fc_norm), -1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        found: Tensor = self.fc(states)
        return found

    def forward(self, embedded: Tensor, previous: Tensor) -> Tensor:
        """Return the first layer's input [..., 2h], of the embedding [..., h] and the feature [..., h] before it."""
        return torch.cat([embedded, previous.to(embedded.dtype)], -1)


class Eagle3Layer(nn.Module):
    """The first layer: attention reads the normed embedding beside the normed feature; the stream is the feature's."""

    def __init__(self, layer: Any, facts: Eagle3Facts, config: PretrainedConfig) -> None:
        """Take the parts of the family's own `layer`, with projections of twice the width."""
        super().__init__()
        self.norm_before_residual, self.has_feature_first = facts.norm_before_residual, False
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        for name in ("q_proj", "k_proj", "v_proj"):
            own: nn.Linear = getattr(self.self_attn, name)
            wide = nn.Linear(2 * own.in_features, own.out_features, bias=own.bias is not None)
            setattr(self.self_attn, name, wide)
        if not facts.has_o_bias:
            self.self_attn.o_proj.bias = None
        self.input_layernorm = layer.input_layernorm
        self.hidden_norm = type(layer.input_layernorm)(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = layer.post_attention_layernorm

    def forward(self, hidden_states: Tensor, **named: Any) -> Tensor:
        """Return the stream [1, k, h] after the layer, of embedding and feature [1, k, 2h]."""
        embedded, feature = hidden_states.chunk(2, -1)
        normed = self.hidden_norm(feature)
        stream = normed if self.norm_before_residual else feature
        halves = [self.input_layernorm(embedded), normed]
        inputs = torch.cat(halves[::-1] if self.has_feature_first else halves, -1)
        attended, _ = self.self_attn(hidden_states=inputs, **named)
        stream = stream + attended
        found: Tensor = stream + self.mlp(self.post_attention_layernorm(stream))
        return found


def own_parts(facts: Eagle3Facts, layers: tuple[int, ...]) -> OwnParts:
    """Return what an EAGLE-3 head has of its own, for features of these layers of the target."""

    def attach(model: PreTrainedModel) -> None:
        config, decoder, dtype = model.config, model.model, model.dtype
        first: Any = decoder.layers[0]
        kind = type(first.input_layernorm)

        def norm(width: int) -> nn.Module:
            return kind(width, eps=config.rms_norm_eps)  # type: ignore[no-any-return]

        with torch.device("meta"):
            model.fuse = Eagle3Fuse(facts, layers, hidden_size=config.hidden_size, norm=norm).to(dtype)
            decoder.layers[0] = Eagle3Layer(first, facts, config).to(dtype)
            model.lm_head = KnownTokensHead(facts, config, norm).to(dtype)
        if not facts.norm_output:
            decoder.norm = nn.Identity()
        rotate_by_axes(decoder)
        model.hides_first_row = True  # type: ignore[assignment]
        model.requires_grad_(False)

    modules = ["fuse", "model.norm", "lm_head.norm"]
    modules += ["lm_head"] if facts.owns_head else []
    modules += ["model.embed_tokens"] if facts.owns_embedding else []
    return OwnParts(attach=attach, modules=tuple(modules))
