"""Verification of coupled trees follows the child that the target draws with the text's own noise.

The target's token is decided by p and the noise alone: whatever tree is walked, the text is the same.
"""

from __future__ import annotations

from edgespec.sampling.noise import TextNoise
from edgespec.tree.token_tree import TokenTree
from edgespec.verify import Acceptance
from edgespec.verify.rows import TargetRows
from edgespec.verify.walk import walk


def verify_coupled(tree: TokenTree, rows: TargetRows, noise: TextNoise) -> Acceptance:
    """Return the path of argmax(log p + g); raises ValueError for trees that were sampled with noise of their own."""
    if tree.draw != "coupled":
        raise ValueError(f"the text's noise does not go with draw '{tree.draw}', which has noise or a rule of its own")
    return walk(tree, lambda node, depth: noise.draw(rows.probs(node), depth + 1))
