"""Membership, for chosen children: draw from p, and go where the tree has the token.

Exact for every tree that the draw of this pass had no part in: what comes out is drawn from p, and the
tree only says whether the next draw's distribution is known already. Sampled children are refused
because multi-round rejection accepts more of them, not because the output would be biased.
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
            f"membership does not go with draw '{tree.draw}': "
            "use it with 'top_k', and multi-round rejection with 'without_replacement'"
        )
    # A wait for the device, for 2n numbers; then two a node, in probs() and for the token that was
    # drawn, which says whose distribution is needed next.
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
