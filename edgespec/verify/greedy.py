"""Verification at temperature 0 follows the child that is the target's argmax. It is exact for any draw."""

from __future__ import annotations

import torch

from edgespec.tree.token_tree import TokenTree
from edgespec.verify import Acceptance
from edgespec.verify.rows import TargetRows
from edgespec.verify.walk import walk


def verify_greedy(tree: TokenTree, rows: TargetRows, _generator: torch.Generator) -> Acceptance:
    """Return the path of the target's first choices through the tree."""
    return walk(tree, lambda node, _depth: rows.best(node))
