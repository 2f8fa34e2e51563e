"""The target: its streamed forward over a text or a tree, and its committed cache.

The boundary to the offload room: what goes wrong there leaves here as EdgespecError.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from edgespec.causal_model import CausalModel
from edgespec.errors import EdgespecError
from edgespec.tree import TokenTree, ancestors_mask, depths
from offload.errors import OffloadError


@contextmanager
def offload_errors() -> Iterator[None]:
    """Turn the offload room's errors into ours."""
    try:
        yield
    except OffloadError as error:
        raise EdgespecError(error.code, error.what, error.fix) from error


class Target:
    """The model whose distribution is the output's."""

    def __init__(self, model: CausalModel) -> None:
        self._model = model
        self._committed = 0  # rows of the cache that are text

    @property
    def device(self) -> torch.device:
        """Where logits come out."""
        return self._model.device

    @property
    def vocab(self) -> int:
        """Columns of the logits."""
        return self._model.vocab

    def prefill(self, ids: Tensor, *, capacity: int) -> Tensor:
        """Start a text with ids [n]; logits [vocab] after it."""
        with offload_errors():
            self._model.reset(capacity)
            logits = self._model.prefill(ids)
        self._committed = ids.shape[0]
        return logits

    def uncommit_last(self) -> None:
        """Forget the row of the text's last token: it becomes a root."""
        self._committed -= 1

    def look(self, tree: TokenTree) -> Tensor:
        """Last hidden states [n, h] of the tree's nodes; the cache holds their rows until `commit`."""
        with offload_errors():
            self._model.cache.truncate(self._committed)  # what an interrupted pass may have left
            positions = self._committed + depths(tree.parents)
            ancestors = ancestors_mask(tree.parents) if tree.ancestors is None else tree.ancestors
            return self._model.look(tree.tokens, positions, ancestors)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [k, vocab] of hidden states [k, h]."""
        with offload_errors():
            return self._model.logits(hidden)

    def commit(self, path: tuple[int, ...]) -> None:
        """The root and the path's nodes became text: keep their rows, drop the others."""
        rows = torch.tensor([0, *path], device=self.device) + self._committed
        self._model.cache.keep(self._committed, rows)
        self._committed += 1 + len(path)
