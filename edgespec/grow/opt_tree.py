"""OPT-Tree: the subtree of n nodes with the largest expected acceptance length, by path probability.

Source: OPT-Tree, section 3, Algorithms 1 and 2, theorems 3.1 and 3.2. E(A) is the sum of the path
probabilities, the n best nodes of all are the tree, and drafting stops when a layer adds less than delta to E(A).
Nodes outside the n best of their layer, which the paper cuts off, are not among the n best of all.
"""

from edgespec.grow.beam import BeamRule, by_path_probability

OPT_TREE_RULE = BeamRule(score=by_path_probability)
STOP_GAIN_OF_LAYER = 2.0  # delta over mu, where speed is best on the built-in pair: docs/papers.md, figure 8
MAX_STOP_GAIN = 0.8  # the best delta of the dearest draft that was measured


def stop_gain_at(layer_share: float) -> float:
    """Return the delta that pays where a layer's draft call takes this share of a pass, which is the paper's mu."""
    return min(MAX_STOP_GAIN, STOP_GAIN_OF_LAYER * layer_share)
