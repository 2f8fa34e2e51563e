"""Growth of token trees from a drafter's distributions. It knows no target: what the target will say comes later."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from edgespec.tree.token_tree import TokenTree


class Grow(Protocol):
    """A policy at work: a function that grows the tree of a step."""

    def __call__(self, root: int, max_depth: int, branches: Tensor | None = None, /) -> TokenTree:
        """Return the tree below a root token, of at most so many layers.

        `branches` [w] are the root's children if given.
        """
