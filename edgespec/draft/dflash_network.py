"""The network of a DFlash drafter: a block of masks reads the text's features, and guesses its own places.

The text's keys and values are made of features alone, the same in all layers, and stay; those of a block never do.
Legend: h the drafter's width, h_t the target's, n the number of states.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from edgespec.draft.axes_rotation import rotate_by_axes
from edgespec.draft.calls import DraftCalls
from edgespec.draft.dflash import DFlashFacts
from edgespec.draft.known_tokens_head import KnownTokensHead
from edgespec.draft.markov import MarkovHead
from edgespec.draft.own_parts import OwnParts
from edgespec.draft.selector import BlockConvolution, CandidateSelector
from edgespec.model.aux_states import AuxStates
from edgespec.model.mechanisms.mechanism import beside
from edgespec.model.pass_cache import spans_under_way


@dataclass(frozen=True, slots=True, kw_only=True)
class GuessedBlock:
    """The places that a drafter guesses in one pass, behind the text."""

    size: int  # rows of a pass: the text's last token, and masks
    mask_token: int
    first_slot: int  # the row whose logits are the next token's
    causal_layers: tuple[bool, ...]  # of each layer, whether a row of the block sees no later one

    @property
    def num_places(self) -> int:
        """The number of places that are guessed."""
        return self.size - self.first_slot

    @property
    def calls(self) -> DraftCalls:
        """How the drafter is called for a tree."""
        return DraftCalls(num_places=self.num_places, num_rows=self.size)


class DFlashFuse(nn.Module):
    """Makes one vector of the target's hidden states, which every layer's keys and values of the text are made of."""

    def __init__(self, facts: DFlashFacts, layers: tuple[int, ...], *, hidden_size: int, norm: nn.Module) -> None:
        super().__init__()
        self.fc = nn.Linear(len(layers) * facts.target_hidden_size, hidden_size, bias=False)
        self.hidden_norm = norm
        self.aux_states = AuxStates(layers=layers, make=self.features)

    def features(self, states: Tensor) -> Tensor:
        """Return the features [k, h] of the target's hidden states side by side [k, n * h_t]."""
        found: Tensor = self.hidden_norm(self.fc(states.to(self.fc.weight.dtype)))
        return found

    def forward(self, embedded: Tensor, previous: Tensor) -> Tensor:
        """Return the features [..., h] of rows of the text, whose tokens are not read."""
        return previous.to(embedded.dtype)


class DFlashLayer(nn.Module):
    """A layer of the family; rows of the text only leave their keys and values, made of what came in, unnormed."""

    def __init__(self, layer: Any, facts: DFlashFacts, *, hidden_size: int) -> None:
        super().__init__()
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.input_layernorm = layer.input_layernorm
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.has_convolutions = facts.selector is not None
        if facts.selector is not None:
            sizes = {"hidden_size": hidden_size, "block_size": facts.block_size}
            self.attention_conv, self.mlp_conv = (BlockConvolution(facts.selector, **sizes) for _ in range(2))
        self.scale = 1.0  # of a block's embeddings, which the first layer reads

    def forward(self, hidden_states: Tensor, **named: Any) -> Tensor:
        """Return the stream [1, k, h] after the layer; of rows of the text, what came in."""
        spans = spans_under_way.get()
        if spans is not None and spans[0].rows.previous is not None:
            self._keep(self.of_context(hidden_states), named["position_embeddings"])
            return hidden_states
        stream = hidden_states * self.scale if self.scale != 1 else hidden_states
        normed = self.input_layernorm(stream)
        if self.has_convolutions:
            return self._mixed(stream, normed, **named)
        stream = stream + self.self_attn(hidden_states=normed, **named)[0]
        found: Tensor = stream + self.mlp(self.post_attention_layernorm(stream))
        return found

    def _mixed(self, stream: Tensor, normed: Tensor, **named: Any) -> Tensor:
        """Return the same of a layer whose parts mix the block's rows before and after them."""
        before, after = self.attention_conv.kernels(normed)
        attended, _ = self.self_attn(hidden_states=self.attention_conv(before, normed), **named)
        stream = stream + self.attention_conv(after, attended)
        normed = self.post_attention_layernorm(stream)
        before, after = self.mlp_conv.kernels(normed)
        found: Tensor = stream + self.mlp_conv(after, self.mlp(self.mlp_conv(before, normed)))
        return found

    def of_context(self, features: Tensor) -> Tensor:
        """Return what keys and values of the text are made of: the features as they are."""
        return features

    def _keep(self, features: Tensor, rotation: tuple[Tensor, Tensor]) -> None:
        """Append the keys and values of rows of all texts [1, k, h] to their caches."""
        attention: Any = self.self_attn
        heads = (*features.shape[:-1], -1, attention.head_dim)
        keys = attention.k_norm(attention.k_proj(features).view(heads)).transpose(1, 2)
        values = attention.v_proj(features).view(heads).transpose(1, 2)
        _, keys = beside(attention, "apply_rotary_pos_emb")(keys, keys, *rotation)
        first = 0
        for span in spans_under_way.get() or ():
            rows = slice(first, first + span.count)
            span.rows.cache.layers[attention.layer_idx].append(keys[:, :, rows], values[:, :, rows])
            first += span.count


def own_parts(facts: DFlashFacts, layers: tuple[int, ...]) -> OwnParts:
    """Return what a DFlash drafter has of its own, for features of these layers of the target."""
    block = GuessedBlock(
        size=facts.block_size,
        mask_token=facts.mask_token,
        first_slot=facts.first_slot,
        causal_layers=facts.causal_layers,
    )

    def attach(model: PreTrainedModel) -> None:
        config: PretrainedConfig = model.config
        decoder: Any = model.model
        norm = type(decoder.norm)
        with torch.device("meta"):
            fused = norm(config.hidden_size, eps=config.rms_norm_eps)
            model.fuse = DFlashFuse(facts, layers, hidden_size=config.hidden_size, norm=fused).to(model.dtype)
            for index, layer in enumerate(decoder.layers):
                decoder.layers[index] = DFlashLayer(layer, facts, hidden_size=config.hidden_size).to(model.dtype)
            decoder.layers[0].scale = facts.embedding_scale or 1.0
            output = KnownTokensHead(facts, config, norm).to(model.dtype)
            output.scale, output.cap = facts.logit_scale or 1.0, facts.logit_cap or 0.0
            model.lm_head = output
            if facts.markov is not None:
                head = MarkovHead(facts.markov, facts, hidden_size=config.hidden_size)
                model.markov = head.to(model.dtype)
            if facts.selector is not None:
                sizes = {"hidden_size": config.hidden_size, "vocab_size": facts.vocab_size}
                model.selector = CandidateSelector(facts.selector, **sizes).to(model.dtype)
        rotate_by_axes(decoder)
        model.block = block  # type: ignore[assignment]
        model.requires_grad_(False)

    modules = ["fuse", "model.norm"]
    modules += ["markov"] if facts.markov is not None else []
    modules += ["selector"] if facts.selector is not None else []
    modules += ["lm_head"] if facts.owns_head else []
    modules += ["model.embed_tokens"] if facts.owns_embedding else []
    return OwnParts(attach=attach, modules=tuple(modules), calls=block.calls)
