"""A walk down a tree by tokens that the target chose, which greedy and coupled verification and membership share."""

from __future__ import annotations

from collections.abc import Callable

import torch

from edgespec.tree.token_tree import TokenTree
from edgespec.verify import Acceptance


def walk(tree: TokenTree, choose: Callable[[int, int], int]) -> Acceptance:
    """Go from the root to the child of the token that `choose` names, as long as there is one.

    It is asked for what follows a node, of so many layers below the root.

    The head computes the rows of the path alone: a handful, where the tree may have hundreds.
    """
    # A wait for the device, for 2n numbers; then those of `choose`: its token says whose row is next.
    children: dict[tuple[int, int], int] = {
        (parent, token): node
        for node, (parent, token) in enumerate(torch.stack([tree.parents, tree.tokens], 1).tolist())
    }
    path: list[int] = []
    node = 0
    while True:
        token = choose(node, len(path))
        child = children.get((node, token))
        if child is None:
            return Acceptance(path=tuple(path), next_token=token)
        path.append(child)
        node = child
