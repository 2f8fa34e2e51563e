"""A block drafter whose places have few candidates, which the token before chooses among: DFlash2.

One pass guesses the block, as in `block.py`. A node's children are the candidates of their place, scored by the node's
token, so that a tree has the distributions of its own paths. Where tokens that sampling cuts off keep a part of q, as
for coupled children, which are the better the closer q is to p, so do tokens that are no candidates: candidates share
what their place gives them together. Legend: s places guessed, V the target's tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edgespec.draft.block import BlockDrafter
from edgespec.draft.distributions import Distributions
from edgespec.draft.selector import CandidateSelector, PlaceCandidates


class SelectorBlockDrafter(BlockDrafter):
    """Drafts with a DFlash2 drafter of the target, whose text `target` is."""

    # What it has for places, [s, V], are logits before candidates are scored.
    _candidates: PlaceCandidates  # of the places of this tree's block

    @property
    def _selector(self) -> CandidateSelector:
        selector = self.model.model.selector
        assert isinstance(selector, CandidateSelector)
        return selector

    @torch.no_grad()
    def took_block(self, hidden: Tensor) -> None:
        """Take the last hidden states [size, h] of the block; raises EdgespecError where logits are not finite."""
        self._took_places(hidden)
        self._made_logits()
        keeps_others = self.sampling.tail_share > 0
        self._candidates = self._selector.candidates(self._places, self._slots, keeps_others=keeps_others)

    @torch.no_grad()
    def answer(self, tokens: Tensor, parent_rows: Tensor) -> Distributions:
        """Return q after nodes of tokens [k] below parent_rows [k] (root: -1)."""
        depths, selector = self.took_nodes(tokens, parent_rows), self._selector
        return self.own_q(depths, lambda rows, places: selector.scored(self._candidates, places, tokens[rows]))
