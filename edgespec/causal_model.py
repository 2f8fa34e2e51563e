"""One transformers model with a tree cache: prefill a text, look at rows of a tree.

Target and draft are both driven by this code; only where their weights lie differs. Legend: n new
rows a call; keys are the cache's rows and then the new ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from edgespec.cache import TreeCache
from edgespec.errors import EdgespecError

_LAYER_KINDS = {"full_attention", "sliding_attention"}
# Families whose attention counts cache slots instead of positions, so that a tree would silently be
# read wrongly, or that are no decoders unless told.
_SLOT_FAMILIES = {"bloom", "mpt", "gpt_neo", "openai-gpt", "xlstm", "bert", "bert-generation", "big_bird"}


def check_can_read_trees(config: PretrainedConfig) -> None:
    """Raise EdgespecError for families that cannot place, or cannot roll back, the nodes of a tree."""
    if config.model_type in _SLOT_FAMILIES or getattr(config, "alibi", False):
        raise EdgespecError(
            "E_UNSUPPORTED_ARCHITECTURE",
            f"model type '{config.model_type}' places tokens by cache slot, not by position, and cannot read a tree.",
            "Use a model with rotary or learned positions.",
        )
    kinds = set(getattr(config, "layer_types", None) or []) - _LAYER_KINDS
    if kinds:
        raise EdgespecError(
            "E_UNSUPPORTED_ARCHITECTURE",
            f"model type '{config.model_type}' has {', '.join(sorted(kinds))} layers, "
            "whose state cannot be rolled back.",
            "Use a model with full or sliding-window attention in every layer.",
        )


class CausalModel:
    """A model, its cache, and the masks that its family takes."""

    def __init__(self, model: PreTrainedModel, *, device: torch.device) -> None:
        self.model = model
        self.device = device
        self.config = model.config.get_text_config(decoder=True)
        self.dtype: torch.dtype = model.dtype
        self.vocab: int = model.get_output_embeddings().weight.shape[0]
        input_table = model.get_input_embeddings().weight
        assert isinstance(input_table, Tensor)
        self.num_embeddings = input_table.shape[0]
        self.cache = TreeCache(self.config.num_hidden_layers, 0)
        kinds = getattr(self.config, "layer_types", None) or []
        window = getattr(self.config, "sliding_window", None)
        # Families with layer_types apply the window in those layers only and take a mask per kind;
        # the others (Mistral, Phi-3) apply it in every layer and take one mask.
        self._mask_per_kind = "sliding_attention" in kinds
        self._window: int | None = window if self._mask_per_kind or not kinds else None

    def reset(self, capacity: int) -> None:
        """An empty cache with room for `capacity` rows."""
        if self.cache.capacity < capacity:
            self.cache = TreeCache(self.config.num_hidden_layers, capacity)
        self.cache.truncate(0)

    @torch.no_grad()
    def prefill(self, ids: Tensor) -> Tensor:
        """Append text ids [n]; logits of the last row: [vocab]."""
        start = self.cache.length
        positions = torch.arange(start, start + ids.shape[0], device=self.device)
        # No mask: transformers builds the causal one, window included, and may use faster kernels.
        return self._forward(ids, positions, None, logits_to_keep=1)[0]

    @torch.no_grad()
    def look(self, ids: Tensor, tail_positions: Tensor, tail_visible: Tensor) -> Tensor:
        """Append rows for ids [n]; logits [n, vocab].

        `tail_visible` [n, tail] bool says which of the last `tail` keys, the new rows among them,
        each new row sees; all keys before those are visible. `tail_positions` [tail] are theirs.
        """
        positions = tail_positions[-ids.shape[0] :]
        return self._forward(ids, positions, self._masks(tail_visible, tail_positions, positions), logits_to_keep=0)

    def _masks(self, tail_visible: Tensor, tail_positions: Tensor, positions: Tensor) -> Any:
        """Additive float masks [1, 1, n, keys] in the form that the family takes.

        Float, because eager attention adds the mask to the scores: a bool mask would add 1.
        """
        num_rows, tail = tail_visible.shape
        num_before = self.cache.length + num_rows - tail
        full = torch.zeros(num_rows, num_before + tail, dtype=self.dtype, device=self.device)
        hidden = torch.finfo(self.dtype).min
        full[:, num_before:].masked_fill_(~tail_visible, hidden)
        if self._window is None:
            return full[None, None]
        key_positions = torch.cat([torch.arange(num_before, device=self.device), tail_positions])
        out_of_window = positions[:, None] - key_positions[None, :] >= self._window
        sliding = full.masked_fill(out_of_window, hidden)[None, None]
        return {"full_attention": full[None, None], "sliding_attention": sliding} if self._mask_per_kind else sliding

    def _forward(self, ids: Tensor, positions: Tensor, mask: Any, *, logits_to_keep: int) -> Tensor:
        output = self.model(
            input_ids=ids[None],
            attention_mask=mask,
            position_ids=positions[None],
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=logits_to_keep,
        )
        logits: Tensor = output.logits
        return logits[0]
