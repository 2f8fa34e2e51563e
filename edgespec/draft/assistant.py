"""A Gemma 4 assistant as drafter: its nodes attend the rows that the target keeps of the text, and nothing else.

It keeps no rows of its own, and has nothing to read of a text: a node is made of its token, and of what its parent
hands on. Legend: h_t the target's width.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from edgespec.config import DraftSampling
from edgespec.draft.language_model import LanguageModelDrafter
from edgespec.draft.own_parts import lent_layers
from edgespec.model.causal_model import CausalModel
from edgespec.model.pass_rows import LentRows, PassRows
from edgespec.model.text_cache import TextCache


class AssistantDrafter(LanguageModelDrafter):
    """Drafts with an assistant of the target, whose text `target` is."""

    def __init__(
        self,
        model: CausalModel,
        target: TextCache,
        *,
        vocab: int,
        sampling: DraftSampling,
        cache: TextCache | None = None,
    ) -> None:
        """Read the rows of `target`, which must keep its hidden states and be at the same text."""
        super().__init__(model, vocab=vocab, sampling=sampling, cache=cache)
        self._target = target
        self._num_text = 0  # tokens before the root
        self._lent: Mapping[str, LentRows] = {}  # to this tree's rows

    @property
    def num_read(self) -> int:
        """The number of the text's tokens that have rows: the target's."""
        return self._num_text

    def begin(self, ids: Sequence[int]) -> None:
        """Start a text, of which nothing is read."""
        self.rewind()
        self._num_text = len(ids)

    def rows_of(self, tokens: Tensor, parent_rows: Tensor) -> PassRows:
        """Return the rows of an expansion for a pass; call `took_in` after it."""
        self.took_paths(tokens, parent_rows)
        if self._num_rows == 0:
            self._lent = lent_rows(self.model.model, self._target.layers, self._num_text)
            previous = self._target.features_before(self._num_text, self._num_text + 1)
        else:
            previous = recycled(self.model.model, self.hidden(parent_rows))
        return PassRows(
            cache=self.cache,
            ids=self._known(tokens),
            positions=torch.full_like(tokens, self._num_text),  # the root's, however deep a node is
            previous=previous,
            lent=self._lent,
        )

    def took_in(self, hidden: Tensor) -> Tensor:
        """Take the last hidden states [k, h] of an expansion's rows, and return them."""
        self._num_rows += hidden.shape[0]
        self._hidden.append(hidden)
        return hidden

    def commit(self, root: int, path_rows: list[int], path_tokens: list[int]) -> None:
        """Count the root and the path as text."""
        del root, path_rows
        self._num_text += 1 + len(path_tokens)
        self.rewind()


def recycled(draft: Any, hidden: Tensor) -> Tensor:
    """Return the features [k, h_t] that rows hand on, of their last hidden states [k, h]."""
    found: Tensor = draft.fuse.post_projection(hidden)
    return found


def lent_rows(draft: Any, layers: Any, count: int, roots: Tensor | None = None) -> dict[str, LentRows]:
    """Return what rows behind so many of a text see of them, by the kind of layer; a window has one more than stated.

    `layers` have the text's rows by the target's layers. Rows of these `roots` [n] see those before their own alone.
    """
    found = {}
    for kind, layer in lent_layers(draft).items():
        keys, values = layers[layer].rows(count)
        reach = draft.config.sliding_window + 1 if kind == "sliding_attention" else count
        if roots is None:
            first = max(0, count - reach)
            found[kind] = LentRows(keys=keys[:, :, first:], values=values[:, :, first:])
        else:
            before = roots[:, None] - torch.arange(count, device=roots.device)
            found[kind] = LentRows(keys=keys, values=values, visible=(before > 0) & (before <= reach))
    return found
