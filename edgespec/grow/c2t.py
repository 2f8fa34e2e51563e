"""C2T: a classifier on path probability, entropy and depth says which candidates stay.

Source: C2T, section 4.2. The first pruning keeps, of the K most probable tokens below each node, those with a
confidence of at least beta; the second keeps the K most confident of a layer.
"""

from dataclasses import dataclass

from torch import Tensor

from edgespec.grow.beam import BeamRule, Candidates
from edgespec.grow.classifier import Classifier
from edgespec.grow.growing import Drawn, Layer
from edgespec.grow.static import Stops
from edgespec.sampling.distribution import entropy_of_top


def c2t_rule(classifier: Classifier, *, width: int) -> BeamRule:
    """Return the rule for `width` (K) nodes a layer; beta is the least score of a node."""
    return BeamRule(score=_ClassifierScore(classifier), read=_read, layer_nodes=width)


@dataclass(frozen=True, slots=True)
class _ClassifierScore:
    classifier: Classifier

    def __call__(self, layer: Candidates) -> Tensor:
        (entropy,) = layer.read
        return self.classifier.confidence(path_probability=layer.path_probability, entropy=entropy, depth=layer.depth)


def _read(layer: Drawn) -> tuple[Tensor, ...]:
    return (entropy_of_top(layer.q),)


def classifier_exit(classifier: Classifier, *, confidence: float) -> Stops:
    """Return the early exit of a static tree: a node whose tokens all miss the confidence ends its branch.

    Source: C2T, section 5.5, for chains.
    """

    def stops(layer: Layer) -> Tensor:
        path_probability = layer.path_probability[:, None] * layer.q_drawn
        found = classifier.confidence(
            path_probability=path_probability, entropy=entropy_of_top(layer.q), depth=layer.depth
        )
        return (found < confidence).all(-1)

    return stops
