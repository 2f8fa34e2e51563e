"""Temperature 0: follow the child that is the target's argmax. Exact for any draw."""

from __future__ import annotations

import torch

from edgespec.tree import TokenTree, all_on_path
from edgespec.verify import Acceptance
from edgespec.verify.rows import Rows


def verify_greedy(tree: TokenTree, rows: Rows, _generator: torch.Generator) -> Acceptance:
    """The path of the target's first choices through the tree."""
    best = rows.argmax()  # [n]
    follows = tree.tokens == best[tree.parents.clamp(min=0)]
    follows[0] = True
    # Siblings differ, so at most one child follows, and what follows all the way is a single path.
    (path,) = all_on_path(follows, tree.parents).nonzero(as_tuple=True)
    # One wait for the device: the path and its bonus token are the step's result.
    *nodes, next_token = torch.cat([path, best[path[-1:]]]).tolist()
    return Acceptance(path=tuple(nodes[1:]), next_token=next_token)
