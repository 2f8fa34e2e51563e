"""Drafters propose the tokens of a tree. This room knows no policy, and no verification.

A drafter is a language model (`language_model.py`) or a feature head (`feature_head.py`). q of a wide layer is made
chunk by chunk and read once (`distributions.py`), because growth needs a few candidates a node. Sampled trees keep
their q, which rejection reads.

The draft knows the text's noise. A node's children are the best of softmax(log q + noise), so that the draft proposes
the tokens that the target is about to draw. A coupled draft is a little colder than the target, and keeps a twentieth
of its mass for tokens that the target's truncation removes. Its logits have the text's penalties, and the root's row
the grammar's mask: children are drawn from this q, so every rule stays exact.

Text is a draft too (`lookup.py`): what followed the end of a text before, found by a suffix automaton
(`suffix_automaton.py`) with chances by match and count (`lookup_acceptance.py`). It is no `Drafter`: it has no q.

A head is one layer of the target's family (`head_network.py`): its decoder layer and `fuse` are its own; embedding,
final norm and language model head are the target's, lent after loading. It reads the target's last hidden states where
text is committed, and its parent's own feature within a tree. A router (`head_router.py`) names the groups of the
vocabulary to compute; q is then the routed distribution.

A target's own low-bit copy is a language model like others (`pair/drafts.py`): it borrows all outside its layers,
and the layers that its target keeps in memory (`placement/copied_layers.py`).

Published drafts are told apart by `draft_kind.py`. A DFlash drafter (`dflash.py`, `dflash_network.py`) guesses a block
of tokens at once, and `block.py` answers for every node of a tree from that one pass; a DSpark drafter adds what the
token before a place says of it (`markov.py`), and a DFlash2 drafter has few candidates, which that
token chooses among (`selector.py`). How many passes a tree takes is stated in `calls.py`.
An EAGLE-3 head (`eagle3.py`, `eagle3_network.py`) reads hidden states from between the target's layers. A
multi-token-prediction layer (`mtp.py`) comes from the target's own checkpoint. How well such a draft agrees with its
target is measured once (`agreement.py`), as its folder says and in other readings (`readings.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

from torch import Tensor

Path: TypeAlias = tuple[int, ...]  # the tokens below the root that lead to a node; the root's is empty


class ProcessDraft(Protocol):
    """Processes a draft's logits before they become q."""

    def __call__(self, logits: Tensor, paths: Sequence[Path]) -> Tensor:
        """Return processed logits [k, vocab] after nodes of these paths."""


class Drafter(Protocol):
    """Proposes continuations. Until `commit`, its rows count the expansions of this tree; the root's is row 0."""

    process: ProcessDraft | None  # None: logits stay as they are

    def begin(self, ids: Sequence[int]) -> None:
        """Start a text."""

    def expand(self, tokens: Tensor, parent_rows: Tensor) -> Tensor:
        """Return the distributions q [k, vocab] after k nodes: tokens [k], and rows of their parents [k] (root: -1)."""

    def rewind(self) -> None:
        """Drop the tree that was grown since the last commit, to grow another from the same text."""

    def commit(self, root: int, path_rows: list[int], path_tokens: list[int]) -> None:
        """Append the root and the path to the text; rows are -1 for nodes that were not expanded."""
