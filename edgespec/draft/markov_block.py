"""A block drafter whose guesses depend on the token before them: DSpark (arXiv 2607.05147).

One pass guesses the block, as in `block.py`. What a node's children are likely to be is the logits of their place and a
bias of the node's token, so that a tree has the distributions of its own paths. Legend: s places guessed, r the rank of
the bias, V the target's tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edgespec.draft.block import BlockDrafter
from edgespec.draft.distributions import Distributions
from edgespec.draft.markov import MarkovHead, bias_of


class MarkovBlockDrafter(BlockDrafter):
    """Drafts with a DSpark drafter of the target, whose text `target` is."""

    # What it has for places, [s, V], are logits without a bias.
    _states: Tensor  # [row, r], of this tree's rows

    @property
    def _markov(self) -> MarkovHead:
        markov = self.model.model.markov
        assert isinstance(markov, MarkovHead)
        return markov

    def took_block(self, hidden: Tensor) -> None:
        """Take the last hidden states [size, h] of the block; raises EdgespecError where logits are not finite."""
        self._took_places(hidden)
        self._states = hidden.new_zeros(0, self._markov.rank)
        self._made_logits()

    @torch.no_grad()
    def answer(self, tokens: Tensor, parent_rows: Tensor) -> Distributions:
        """Return q after nodes of tokens [k] below parent_rows [k] (root: -1)."""
        is_root = self._num_rows == 0
        before = self._states.new_zeros(1, self._markov.rank) if is_root else self._states[parent_rows]
        depths = self.took_nodes(tokens, parent_rows)
        latent, states = self._markov(tokens, self._slots[depths.clamp(max=self._num_slots - 1)], before)
        self._states = torch.cat([self._states, states])
        return self.own_q(depths, lambda rows, places: self._places[places] + self._bias(latent[rows]))

    def _bias(self, latent: Tensor) -> Tensor:
        """Return what is added to the logits of all tokens [k, V]."""
        return bias_of(self.model.model, latent, self.model.vocab)
