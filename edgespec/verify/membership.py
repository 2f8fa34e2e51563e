"""Membership, for chosen children: draw from p, and go where the tree has the token.

Exact for any tree whose tokens are a function of the context: what is drawn is drawn from p, and the
tree only says whether the next draw's distribution is known already.
"""

from __future__ import annotations

import torch

from edgespec.sampling import draw_one
from edgespec.tree import TokenTree
from edgespec.verify import Acceptance
from edgespec.verify.rows import Rows


def verify_membership(tree: TokenTree, rows: Rows, generator: torch.Generator) -> Acceptance:
    """The path of tokens drawn from the target; raises ValueError for trees that were sampled."""
    if tree.draw != "top_k":
        raise ValueError(
            f"membership is not lossless for draw '{tree.draw}': "
            "use it with 'top_k', and multi-round rejection with 'without_replacement'"
        )
    children: dict[tuple[int, int], int] = {
        (parent, token): node
        for node, (parent, token) in enumerate(torch.stack([tree.parents, tree.tokens], 1).tolist())
    }
    path: list[int] = []
    node = 0
    while True:
        token = draw_one(rows.probs(node), generator)
        child = children.get((node, token))
        if child is None:
            return Acceptance(path=tuple(path), next_token=token)
        path.append(child)
        node = child
