"""Depth-first node order leaves fewer attention blocks that are not empty, because long paths stand side by side.

Source: DySpec, appendix C. Growth numbers nodes layer by layer; a kernel that skips empty blocks of the
mask has less to do when they are numbered depth first, earlier siblings (the ones with the larger
subtrees, as a rule) before later ones. No kernel here makes use of it yet.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from edgespec.tree.token_tree import TokenTree, ancestors_mask


def depth_first_order(parents: Tensor) -> Tensor:
    """Return the old numbers in the new order, [n]; siblings keep theirs, parents come before their children."""
    ancestors = ancestors_mask(parents)  # [n, n]
    subtree_sizes = ancestors.sum(0)
    # A node comes behind its ancestors, and behind the subtrees of all earlier siblings along its path.
    is_sibling = parents[:, None] == parents[None, :]
    before = (is_sibling.tril(-1) * subtree_sizes[None, :]).sum(1)  # [n], nodes below earlier siblings
    positions = (ancestors * (1 + before)[None, :]).sum(1) - 1
    return positions.argsort()


def reordered(tree: TokenTree, order: Tensor) -> TokenTree:
    """Return the same tree with its nodes in another order [n], parents first."""
    number = torch.empty_like(order)
    number[order] = torch.arange(order.shape[0], device=order.device)
    parents = tree.parents[order]
    return replace(
        tree,
        tokens=tree.tokens[order],
        parents=torch.where(parents >= 0, number[parents.clamp(min=0)], -1),
        ranks=tree.ranks[order],
        draft_rows=tree.draft_rows[order],
        ancestors=None,
    )


def num_blocks(mask: Tensor, *, block: int = 32, num_before: int = 0) -> int:
    """Return how many blocks of a mask [n, n] have something visible, behind `num_before` keys that all rows see."""
    whole = functional.pad(mask, (num_before, 0), value=True)
    rows, keys = (-(-size // block) for size in whole.shape)
    padded = functional.pad(whole, (0, keys * block - whole.shape[1], 0, rows * block - whole.shape[0]), value=False)
    return int(padded.view(rows, block, keys, block).any(3).any(1).sum())
