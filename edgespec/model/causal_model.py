"""One transformers model with a tree cache: prefill a text, look at rows of a tree.

This code drives both target and draft; only where their weights lie differs. The ids of the committed
text are kept beside its rows, so that what a cache holds can always be looked up. Legend: n new rows a
call; keys are the cache's rows and then the new ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from edgespec.errors import EdgespecError
from edgespec.model.family_logits import decoder_of, family_logits
from edgespec.model.hidden_rows import HiddenRows
from edgespec.model.layer_major import LayerMajor, Watch
from edgespec.model.masks import MaskForm
from edgespec.model.tree_cache import TreeCache
from offload.skeleton import decoder_layers

PREFILL_ROWS = 512  # of a text that pass a layer at once

_LAYER_KINDS = {"full_attention", "sliding_attention"}


def check_can_roll_back(config: PretrainedConfig) -> None:
    """Raise EdgespecError for layers whose state cannot forget the nodes of a tree: recurrent, linear attention."""
    if not getattr(config, "num_attention_heads", None):
        raise EdgespecError(
            "E_UNSUPPORTED_ARCHITECTURE",
            f"model type '{config.model_type}' has no attention, and the state that it keeps cannot be rolled back.",
            "Use a model with full or sliding-window attention in every layer.",
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

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        device: torch.device,
        chunk_rows: int = PREFILL_ROWS,
        keeps_hidden: bool = False,
    ) -> None:
        """With `keeps_hidden`, `features_before` gives the last hidden states of the text's rows."""
        self.model = model
        self._hidden = HiddenRows() if keeps_hidden else None
        self.device = device
        self.config = model.config.get_text_config(decoder=True)
        self.vocab: int = model.get_output_embeddings().weight.shape[0]
        input_table = model.get_input_embeddings().weight
        assert isinstance(input_table, Tensor)
        self.num_embeddings = input_table.shape[0]
        self.cache = TreeCache(self.config.num_hidden_layers, 0)
        self._text: list[int] = []
        self._masks = MaskForm(self.config, dtype=model.dtype, device=device)
        self._decoder = decoder_of(model)
        self._layer_major = LayerMajor(decoder_layers(model)[1], self._masks, chunk_rows=chunk_rows)

    @property
    def text(self) -> Sequence[int]:
        """Return the ids of the cache's first rows; behind them lie rows of a tree or of an unfinished pass."""
        return self._text

    def close(self) -> None:
        """Leave the layers as they were found, so that nothing keeps their weights alive."""
        self._layer_major.close()

    @property
    def watch(self) -> Watch | None:
        """Return the function that is called before every layer of a pass."""
        return self._layer_major.watch

    @watch.setter
    def watch(self, watch: Watch | None) -> None:
        self._layer_major.watch = watch

    def reset(self, capacity: int) -> None:
        """Empty the cache and make room for `capacity` rows."""
        self._text = []
        if self.cache.capacity < capacity:
            self.cache = TreeCache(self.config.num_hidden_layers, capacity)
        self.cache.truncate(0)

    def keep_prefix(self, ids: list[int], capacity: int) -> int:
        """Keep the rows of the beginning that the text and `ids` share, and return how many those are.

        The cache then has room for `capacity` rows.
        """
        pairs = enumerate(zip(self._text, ids, strict=False))
        kept = next((row for row, (old, new) in pairs if old != new), min(len(self._text), len(ids)))
        del self._text[kept:]
        self.cache.truncate(kept)
        self.cache.reserve(capacity)
        return kept

    def commit(self, rows: Tensor, ids: list[int]) -> None:
        """Let `rows` [j], counted from the cache's start, become text of these ids; drop the others behind the text."""
        self.cache.keep(len(self._text), rows)
        if self._hidden is not None:
            self._hidden.keep(len(self._text), rows)
        self._text += ids  # last: whatever ends this before leaves the text that there was

    def commit_next(self, ids: list[int]) -> None:
        """Let the first rows behind the text become text of these ids; what lies behind them stays."""
        self._text += ids

    def uncommit_last(self) -> None:
        """Forget that the row of the text's last token is text."""
        self._text.pop()

    def features_before(self, first: int, end: int) -> Tensor:
        """Return last hidden states [end - first, h] of the positions before the text's rows [first, end).

        The position before row 0 has zeros.
        """
        assert self._hidden is not None
        return self._hidden.before(first, end)

    @torch.no_grad()
    def prefill(self, ids: Tensor, *, previous: Tensor | None = None) -> Tensor:
        """Append text ids [n] in one pass over the weights, and return the logits [vocab] of the last row.

        `previous` [n, h] are the target's features of the positions before, which a feature head reads.
        """
        self.cache.truncate(len(self._text))  # what an interrupted pass may have left
        start, num_rows = len(self._text), ids.shape[0]
        positions = torch.arange(start, start + num_rows, device=self.device)
        if num_rows <= self._layer_major.chunk_rows:
            # No mask: transformers builds the causal one, window included, and may use faster kernels.
            logits = self._forward(ids, positions, None, previous)[0]
        else:
            with self._layer_major.text(start, num_rows):
                logits = self._forward(ids, positions, self._masks.stand_ins(), previous)[0]
        self._text += ids.tolist()  # a prompt's, which came from the host
        return logits

    @torch.no_grad()
    def look(
        self, ids: Tensor, tail_positions: Tensor, tail_visible: Tensor, *, previous: Tensor | None = None
    ) -> Tensor:
        """Append rows for ids [n], and return their last hidden states [n, h], for `logits`.

        `tail_visible` [n, tail] bool says which of the last `tail` keys, the new rows among them,
        each new row sees; all keys before those are visible. `tail_positions` [tail] are the positions
        of those keys. `previous` [n, h] are the features before the new rows, which a feature head reads.
        """
        num_rows, tail = tail_visible.shape
        mask = self._masks.tree(tail_visible, tail_positions, num_before=self.cache.length + num_rows - tail)
        return self._decode(ids, tail_positions[-num_rows:], mask, previous)

    @torch.no_grad()
    def logits(self, hidden: Tensor, tokens: list[slice] | None = None) -> Tensor:
        """Return the family's own logits [k, vocab] of last hidden states [k, h].

        Where ranges of tokens are given, only their logits are computed.
        """
        return family_logits(self.model, self._decoder, hidden, tokens)

    @torch.no_grad()
    def features_of_texts(self, ids: Tensor) -> Tensor:
        """Return last hidden states [texts, rows, h] of texts [texts, rows], padded at their ends.

        It takes one pass over the weights for all texts, and the temporaries of some texts at a time. The cache is not
        used.
        """
        num_texts, num_rows = ids.shape
        positions = torch.arange(num_rows, device=self.device)[None]
        with self._layer_major.texts(num_texts, num_rows):
            output = self._decoder(
                input_ids=ids, attention_mask=self._masks.stand_ins(), position_ids=positions, use_cache=False
            )
        hidden: Tensor = output.last_hidden_state
        return hidden

    def _decode(self, ids: Tensor, positions: Tensor, mask: Any, previous: Tensor | None) -> Tensor:
        """Return the last hidden states [n, h] of new rows at positions [n]."""
        first = self.cache.length
        inputs = {"input_ids": ids[None]}
        if previous is not None:
            embedded = self.model.get_input_embeddings()(ids)
            inputs = {"inputs_embeds": self.model.fuse(embedded, previous)[None]}  # type: ignore[operator]
        output = self._decoder(
            **inputs, attention_mask=mask, position_ids=positions[None], past_key_values=self.cache, use_cache=True
        )
        hidden: Tensor = output.last_hidden_state[0]
        if self._hidden is not None:
            self._hidden.write(first, hidden, capacity=self.cache.capacity)
        return hidden

    def _forward(self, ids: Tensor, positions: Tensor, mask: Any, previous: Tensor | None) -> Tensor:
        """Return the logits [1, vocab] of the last row."""
        if self._hidden is not None or previous is not None:
            return self.logits(self._decode(ids, positions, mask, previous)[-1:])
        output = self.model(
            input_ids=ids[None],
            attention_mask=mask,
            position_ids=positions[None],
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits
        return logits[0]
