"""C2T: a classifier on path probability, entropy and depth says which candidates stay.

Source: C2T, section 4.2. The first pruning keeps, of the K most probable tokens below each node, those with a
confidence of at least beta; the second keeps the K most confident of a layer.
"""

from __future__ import annotations

from torch import Tensor

from edgespec.grow.beam import BeamRule, by_path_probability
from edgespec.grow.classifier import Classifier
from edgespec.grow.growing import Layer
from edgespec.grow.static import Stops
from edgespec.sampling.distribution import entropy_of_top


def c2t_rule(classifier: Classifier, *, confidence: float, width: int) -> BeamRule:
    """Return the rule for threshold `confidence` (beta) and `width` (K) nodes a layer."""
    return BeamRule(
        score=lambda layer: _confidence(classifier, layer),
        threshold=confidence,
        layer_nodes=width,
        layer_expanded=width,
    )


def classifier_exit(classifier: Classifier, *, confidence: float) -> Stops:
    """Return the early exit of a static tree: nothing follows tokens of which none reaches the confidence.

    Source: C2T, section 5.5, for chains.
    """
    return lambda layer: (_confidence(classifier, layer) < confidence).all(-1)


def _confidence(classifier: Classifier, layer: Layer) -> Tensor:
    """Return the confidence of every candidate: [k, c]."""
    return classifier.confidence(
        path_probability=by_path_probability(layer), entropy=entropy_of_top(layer.q), depth=layer.depth
    )
