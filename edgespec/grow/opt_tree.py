"""OPT-Tree: the subtree of `size` nodes with the largest expected acceptance length, by path probability.

Source: OPT-Tree, section 3, Algorithms 1 and 2, theorems 3.1 and 3.2. E(A) is the sum of the path
probabilities; every layer keeps its n best, the n best of all are the tree, and drafting stops when a
layer adds less than delta to E(A).
"""

from __future__ import annotations

from edgespec.grow.beam import BeamRule, by_path_probability


def opt_tree_rule(*, size: int, stop_gain: float) -> BeamRule:
    """Return the rule for trees of `size` nodes; `stop_gain` is the paper's delta, and 0 drafts to the full depth."""
    return BeamRule(
        score=by_path_probability,
        layer_nodes=size,
        layer_expanded=size,
        stops=(lambda outcome: outcome.gain < stop_gain) if stop_gain > 0 else None,
    )
