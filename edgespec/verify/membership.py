"""Membership, for chosen children: draw from p, and go where the tree has the token.

It is exact for every tree that the draw of this pass had no part in: what comes out is drawn from p, and the
tree only says whether the next draw's distribution is known already. Sampled children are refused
because multi-round rejection accepts more of them, not because the output would be biased.
"""

from __future__ import annotations

import torch

from edgespec.sampling.draws import draw_one
from edgespec.tree.token_tree import TokenTree
from edgespec.verify import Acceptance
from edgespec.verify.rows import TargetRows
from edgespec.verify.walk import walk


def verify_membership(tree: TokenTree, rows: TargetRows, generator: torch.Generator) -> Acceptance:
    """Return the path of tokens drawn from the target; raises ValueError for trees that were sampled."""
    if tree.draw != "chosen":
        raise ValueError(
            f"membership does not go with draw '{tree.draw}': "
            "use it with 'chosen', and multi-round rejection with 'sampled'"
        )
    return walk(tree, lambda node, _depth: draw_one(rows.probs(node), generator))
