"""The network of a Gemma 4 assistant: a decoder whose rows attend keys and values that its target keeps of the text.

Its layers are the family's, but for attention; its rows see no other rows of their own. Legend: m rows of a text, h the
assistant's width, h_t the target's, V tokens.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention
from transformers import PretrainedConfig, PreTrainedModel

from edgespec.draft.gemma_assistant import AssistantFacts, Ordering, lent_by
from edgespec.draft.mtp import MtpFuse
from edgespec.draft.own_parts import OwnParts
from edgespec.model.mechanisms.mechanism import beside
from edgespec.model.pass_cache import spans_under_way

ROWS_AT_ONCE = 4  # of an ordered head, which looks up thousands of rows of its table for each


class AssistantFuse(MtpFuse):
    """Makes the first layer's input of an embedding and the feature before it, and a feature of the last one's."""

    def __init__(self, target_size: int, size: int) -> None:
        nn.Module.__init__(self)
        self.enorm, self.hnorm = nn.Identity(), nn.Identity()  # the target's own are read as they are
        self.eh_proj = nn.Linear(2 * target_size, size, bias=False)
        self.post_projection = nn.Linear(size, target_size, bias=False)
        self.has_feature_first = False


class LentAttention(nn.Module):
    """Attention to the keys and values that another model lends to the rows of a text."""

    def __init__(self, attention: Any, kind: str) -> None:
        super().__init__()
        self.q_proj, self.q_norm, self.o_proj = attention.q_proj, attention.q_norm, attention.o_proj
        self.head_dim, self._kind = attention.head_dim, kind
        self._rotated = beside(attention, "apply_rotary_pos_emb")

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any
    ) -> tuple[Tensor, None]:
        """Return the attention [1, k, h] of the rows of all texts."""
        query = self.q_proj(hidden_states).view(*hidden_states.shape[:-1], -1, self.head_dim)
        query = self._rotated(self.q_norm(query), *position_embeddings, unsqueeze_dim=2).transpose(1, 2)
        attended, first = [], 0
        for span in spans_under_way.get() or ():
            assert span.rows.lent is not None
            lent = span.rows.lent[self._kind]
            own = query[:, :, first : first + span.count]
            # A group's heads are further rows of their key head
            folded = own.reshape(1, lent.keys.shape[1], -1, self.head_dim)
            seen = lent.visible
            if seen is not None:
                seen = seen[span.first : span.end].repeat(folded.shape[2] // span.count, 1)
            found = scaled_dot_product_attention(folded, lent.keys, lent.values, attn_mask=seen, scale=1.0)
            attended.append(found.reshape(own.shape))
            first += span.count
        whole = torch.cat(attended, 2).transpose(1, 2)
        return self.o_proj(whole.reshape(*hidden_states.shape[:-1], -1)), None


class OrderedHead(nn.Linear):
    """A head that computes the tokens of the likeliest groups; all others have one less than the least of these."""

    token_ordering: Tensor  # [V], the tokens group by group

    def __init__(self, ordering: Ordering, size: int, vocab: int) -> None:
        super().__init__(size, vocab, bias=False)
        self.centroids = nn.Linear(size, ordering.num_centroids, bias=False)
        self.register_buffer("token_ordering", torch.zeros(vocab, dtype=torch.int64))
        self._num_computed = ordering.num_computed

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 -- as it is called by name
        """Return logits [..., V] of outputs [..., h]."""
        rows = input.flatten(0, -2)
        found = torch.cat([self._of_few(few) for few in rows.split(ROWS_AT_ONCE)])
        return found.view(*input.shape[:-1], -1)

    def _of_few(self, rows: Tensor) -> Tensor:
        groups = self.token_ordering.view(self.centroids.out_features, -1)
        best = linear(rows, self.centroids.weight).topk(self._num_computed).indices
        tokens = groups[best].flatten(1)
        logits = (self.weight[tokens] @ rows[:, :, None])[..., 0]
        others = logits.amin(1, keepdim=True) - 1  # each row's own: it does not depend on the rows beside it
        return others.expand(-1, self.out_features).scatter(1, tokens, logits)


def own_parts(facts: AssistantFacts, target: PretrainedConfig) -> OwnParts:
    """Return what an assistant has of its own beside its layers, for a target of this text config."""
    lent = lent_by(target)

    def attach(model: PreTrainedModel) -> None:
        config: PretrainedConfig = model.config
        decoder: Any = model.model
        size, vocab = int(config.hidden_size), facts.vocab_size
        with torch.device("meta"):
            model.fuse = AssistantFuse(facts.target_hidden_size, size).to(model.dtype)
            # The target's own table, which is as wide as the target
            table = decoder.embed_tokens
            table.weight = nn.Parameter(torch.empty(vocab, facts.target_hidden_size, dtype=model.dtype))
            table.embedding_dim = facts.target_hidden_size
            if facts.ordering is not None:
                model.lm_head = OrderedHead(facts.ordering, size, vocab).to(model.dtype)
        table.embed_scale = torch.tensor(facts.target_hidden_size**0.5)
        for layer, kind in zip(decoder.layers, config.layer_types, strict=True):
            layer.self_attn = LentAttention(layer.self_attn, kind)
        decoder.first_kv_shared_layer_idx = None  # from which on transformers' code leaves out rows
        model.lent_layers = {kind: lent[kind] for kind in facts.head_dims}  # type: ignore[assignment]
        model.requires_grad_(False)

    return OwnParts(attach=attach, modules=("fuse", "model.norm", "lm_head"))
