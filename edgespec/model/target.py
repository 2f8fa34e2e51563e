"""The target: its streamed forward over a text or a tree, and its committed cache.

What goes wrong in the offload room leaves here as EdgespecError.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edgespec.errors import offload_errors
from edgespec.model.causal_model import CausalModel
from edgespec.tree.token_tree import TokenTree, ancestors_mask, depths


class Target:
    """The model whose distribution the output has."""

    def __init__(self, model: CausalModel, *, keeps_text: bool = False) -> None:
        """With `keeps_text` a text starts on the rows that it has in common with the last one."""
        self._model = model
        self._keeps_text = keeps_text
        self._looked_at: Tensor | None = None  # tokens [n] of the tree whose rows the cache holds
        self.num_kept = 0  # rows that the last prefill found there

    @property
    def device(self) -> torch.device:
        """The device that logits come out on."""
        return self._model.device

    @property
    def vocab(self) -> int:
        """The number of the logits' columns."""
        return self._model.vocab

    def prefill(self, ids: Tensor, *, capacity: int) -> Tensor:
        """Start a text with ids [n], and return the logits [vocab] after it."""
        if self._keeps_text:
            # The last row is always computed: its logits are asked for.
            self.num_kept = self._model.keep_prefix(ids[:-1].tolist(), capacity)  # they came from the host
        else:
            self._model.reset(capacity)
        with offload_errors():
            return self._model.prefill(ids[self.num_kept :])

    def uncommit_last(self) -> None:
        """Forget the row of the text's last token: it becomes a root."""
        self._model.uncommit_last()

    def look(self, tree: TokenTree) -> Tensor:
        """Return the last hidden states [n, h] of the tree's nodes; the cache holds their rows until `commit`."""
        with offload_errors():
            committed = len(self._model.text)
            self._model.cache.truncate(committed)  # what an interrupted pass may have left
            self._looked_at = tree.tokens
            positions = committed + depths(tree.parents)
            ancestors = ancestors_mask(tree.parents) if tree.ancestors is None else tree.ancestors
            return self._model.look(tree.tokens, positions, ancestors)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [k, vocab] of hidden states [k, h]."""
        with offload_errors():
            return self._model.logits(hidden)

    def commit(self, path: tuple[int, ...]) -> None:
        """Make the root and the path's nodes text: keep their rows, and drop the others."""
        assert self._looked_at is not None
        nodes = torch.tensor([0, *path], device=self.device)
        tokens = self._looked_at[nodes].tolist()  # a handful, after verification has waited for the pass
        self._model.commit(nodes + len(self._model.text), tokens)
