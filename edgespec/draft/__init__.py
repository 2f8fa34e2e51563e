"""Drafters propose the tokens of a tree. This room knows no policy, and no verification."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class ProcessDraft(Protocol):
    """What becomes of a draft's logits before they are made q."""

    def __call__(self, logits: Tensor, *, is_root: bool) -> Tensor:
        """Return what logits [k, vocab] become, behind the root or behind other nodes of a tree."""


class Drafter(Protocol):
    """Proposes continuations. Until `commit`, its rows count the expansions of this tree; the root's is row 0."""

    process: ProcessDraft | None  # None: logits are taken as they are

    def begin(self, ids: Sequence[int]) -> None:
        """Start a text."""

    def expand(self, tokens: Tensor, parent_rows: Tensor) -> Tensor:
        """Return the distributions q [k, vocab] after k nodes: tokens [k], and rows of their parents [k] (root: -1)."""

    def rewind(self) -> None:
        """Forget the tree that was grown since the last commit: another can be grown from the same text."""

    def commit(self, root: int, path_rows: list[int], path_tokens: list[int]) -> None:
        """Make the root and then the path text; rows are -1 for nodes that were not expanded."""
