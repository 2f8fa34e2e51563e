"""A small language model of the target's vocabulary as drafter, wholly resident.

Expanded nodes keep their keys and values in the drafter's cache: one forward a tree layer, each
node seeing the committed text and its own ancestors. After verification the rows of the accepted
path stay. A path may end in a node that was never expanded; such tokens are pending, and go in
front of the next root.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edgespec.config import DraftSampling
from edgespec.errors import EdgespecError
from edgespec.model.causal_model import CausalModel
from edgespec.model.row_chunks import row_chunks
from edgespec.sampling.distribution import to_draft_probs


class LanguageModelDrafter:
    """Drafts with a causal language model; `sampling` is how children are drawn, and may change between trees."""

    def __init__(
        self,
        model: CausalModel,
        *,
        vocab: int,
        sampling: DraftSampling,
        tree_rows: int,
        keeps_text: bool = False,
    ) -> None:
        """With `keeps_text` a text starts on the rows that it has in common with the last one."""
        self._model = model
        self._keeps_text = keeps_text
        self._vocab = vocab  # the target's: padded embedding tables may differ in length
        self.sampling = sampling
        self._num_embeddings = model.num_embeddings
        self._pending: list[int] = []  # committed, without rows yet
        self._num_rows = 0
        self._hidden: list[Tensor] = []  # [k, h], one entry an expansion of this tree
        self._visible = torch.zeros(tree_rows, tree_rows, dtype=torch.bool, device=model.device)  # [row, row]
        self._positions = torch.zeros(tree_rows, dtype=torch.long, device=model.device)  # [row]

    def prefill(self, ids: Tensor, *, capacity: int) -> None:
        """Start a text with ids [n]."""
        self._pending = []
        self.rewind()
        ids, kept = self._known(ids), 0
        if self._keeps_text:
            kept = self._model.keep_prefix(ids.tolist(), capacity)  # they came from the host
        else:
            self._model.reset(capacity)
        if ids.shape[0] > kept:  # else all is there; or the text is one token, which is the root
            self._model.prefill(ids[kept:], previous=self._features_before(kept, ids.shape[0]))

    def expand(self, tokens: Tensor, parent_rows: Tensor) -> Tensor:
        """Return q [k, vocab] after nodes of tokens [k] below parent_rows [k].

        The first call is the root's.
        """
        if self._num_rows == 0:
            return self._expand_root(tokens)
        start, end = self._num_rows, self._num_rows + tokens.shape[0]
        if end > self._positions.shape[0]:
            self._grow(end)
        self._visible[start:end, :start] = self._visible[parent_rows, :start]
        self._visible[start:end, start:end] = torch.eye(end - start, dtype=torch.bool, device=tokens.device)
        self._positions[start:end] = self._positions[parent_rows] + 1
        self._num_rows = end
        hidden = self._model.look(
            self._known(tokens),
            self._positions[:end],
            self._visible[start:end, :end],
            previous=self._features_of(parent_rows),
        )
        self._hidden.append(hidden)
        return self._after(hidden)

    def hidden(self, rows: Tensor) -> Tensor:
        """Return last hidden states [k, h] of this tree's rows [k], expanded since the last commit."""
        self._hidden = [torch.cat(self._hidden)]
        return self._hidden[0][rows]

    @property
    def num_rows(self) -> int:
        """The number of rows computed for this tree."""
        return self._num_rows

    def rewind(self) -> None:
        """Forget the tree that was grown since the last commit: another can be grown from the same text."""
        self._num_rows = 0
        self._hidden = []

    def commit(self, root: int, path_rows: list[int], path_tokens: list[int]) -> None:
        """Keep the rows of the root and of the path; tokens without a row become pending."""
        rows, tokens = [0, *path_rows], [root, *path_tokens]
        num_cached = 0 if self._num_rows == 0 else self._num_lasting(rows)
        kept = torch.tensor(rows[:num_cached], dtype=torch.long, device=self._model.device) + len(self._model.text)
        self._model.commit(kept, self._known(torch.tensor(tokens[:num_cached], dtype=torch.long)).tolist())
        self._pending += tokens[num_cached:]
        self.rewind()

    def _expand_root(self, root: Tensor) -> Tensor:
        """Return q [1, vocab] after the pending tokens and the root [1]."""
        committed = len(self._model.text)
        self._model.cache.truncate(committed)
        pending = torch.tensor(self._pending, dtype=torch.long, device=root.device)
        ids = torch.cat([pending, root])
        positions = torch.arange(committed, committed + ids.shape[0], device=root.device)
        causal = torch.ones(ids.shape[0], ids.shape[0], dtype=torch.bool, device=root.device).tril_()
        end = committed + ids.shape[0]
        hidden = self._model.look(self._known(ids), positions, causal, previous=self._features_before(committed, end))[
            -1:
        ]
        q = self._after_root(hidden)
        self._model.commit_next(self._known(torch.tensor(self._pending, dtype=torch.long)).tolist())
        self._pending = []
        self._hidden, self._num_rows = [hidden], 1
        self._visible[0, 0] = True
        self._positions[0] = len(self._model.text)
        return q

    def _num_lasting(self, rows: list[int]) -> int:
        """Return how many rows of the root and the path, from the front, can stay as the text's own."""
        return rows.index(-1) if -1 in rows else len(rows)

    def _features_before(self, first: int, end: int) -> Tensor | None:
        """Return what the model reads beside the text's tokens [first, end): nothing."""
        del first, end
        return None

    def _features_of(self, rows: Tensor) -> Tensor | None:
        """Return what the model reads beside the children of this tree's rows [k]: nothing."""
        del rows
        return None

    def _known(self, ids: Tensor) -> Tensor:
        """Return ids that the draft can look up, because the target's table may have more rows.

        What stands in for the others does not matter: any q is lossless.
        """
        return ids.masked_fill(ids >= self._num_embeddings, 0)

    def _after_root(self, hidden: Tensor) -> Tensor:
        """Return q [1, vocab] of the root's hidden state [1, h].

        Raises EdgespecError where its logits are not finite.
        """
        logits = self._model.logits(hidden)
        refuse_not_finite(logits)
        return self._probabilities(logits)

    def _after(self, hidden: Tensor) -> Tensor:
        """Return q [k, vocab] of hidden states [k, h]; beside it, only a chunk's logits exist at a time."""
        chunks = list(row_chunks(hidden.shape[0], self._model.vocab))
        first = self._probabilities(self._model.logits(hidden[chunks[0]]))
        if len(chunks) == 1:
            return first
        q = first.new_empty(hidden.shape[0], self._vocab)
        q[chunks[0]] = first
        for rows in chunks[1:]:
            q[rows] = self._probabilities(self._model.logits(hidden[rows]))
        return q

    def _probabilities(self, logits: Tensor) -> Tensor:
        """Return q over the target's vocabulary: padding is cut off, tokens the draft lacks have 0."""
        q = to_draft_probs(logits[:, : self._vocab], self.sampling)
        return torch.nn.functional.pad(q, (0, self._vocab - q.shape[1]))

    def _grow(self, rows: int) -> None:
        """Make room for more rows than planned: the tree drew far more nodes than it will keep."""
        old = self._positions.shape[0]
        size = max(rows, old * 2)
        visible, positions = self._visible, self._positions
        self._visible, self._positions = visible.new_zeros(size, size), positions.new_zeros(size)
        self._visible[:old, :old], self._positions[:old] = visible, positions


def refuse_not_finite(logits: Tensor) -> None:
    """Raise EdgespecError where a draft's logits are not finite.

    This comes before they are made probabilities, which may hide it.
    """
    if not bool(logits.amax().isfinite()):
        raise EdgespecError(
            "E_NAN_LOGITS",
            "the draft's logits are NaN or infinite.",
            "Use another draft, `dtype=float32`, or `policy=none`.",
        )
