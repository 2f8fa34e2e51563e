"""What a node and a layer must at least bring: what the seconds that they add would bring elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.tuning.calibration import GrownTree, ScoreCalibration
from edgespec.tuning.situation import Situation
from edgespec.tuning.tokens_by_size import MeanTree
from edgespec.tuning.tree_limits import MAX_GAIN, MAX_SCORE, TreeLimits

MIN_RANGE = 8.0  # nodes over which the slope of passes is taken
MIN_CONTINUATION = 0.3
CONTINUATION_TREES = 16.0  # of its running mean


class Margins:
    """The least nodes and layers of the last trees, and how layers continue."""

    def __init__(self, start: TreeLimits) -> None:
        self._continuation = 0.7  # a layer's expected tokens over those of the one before
        self._least_score, self._least_gain = start.threshold, start.stop_gain  # in the last tree

    def learn(self, expected: Sequence[float], layers: Sequence[int], trees: Sequence[GrownTree]) -> None:
        """Learn from trees that share a budget: each node's expected tokens and layer."""
        num_layers = max((*layers, 1))  # a call finds out that no node is worth it
        by_layer = [0.0] * (num_layers + 1)
        for layer, tokens in zip(layers, expected, strict=True):
            by_layer[layer] += tokens / len(trees)
        self._least_score = min((score for tree in trees for score in tree.scores), default=0.0)
        self._least_gain = min(by_layer[1:])
        if num_layers > 1:
            ratio = sum(by_layer[2:]) / max(1e-9, sum(by_layer[:-1]))
            self._continuation += (min(1.0, max(MIN_CONTINUATION, ratio)) - self._continuation) / CONTINUATION_TREES

    def first(self, now: Situation) -> TreeLimits:
        """Return the limits of a first tree: as small as usual trees pay most, and no deeper."""
        tree = now.usual_tree
        size = min((size for size in now.sizes if size >= tree.nodes), default=now.sizes[-1])
        limits = TreeLimits(size)
        _, layer_s, _ = now.costs.growth.parts()
        gain = max(now.plain_per_s, now.per_s(tree)) * layer_s / now.num_texts / self._continuation
        return limits.nearer_to(0.0, gain, met=(MAX_SCORE, MAX_GAIN))

    def limits(self, now: Situation, tree: MeanTree, per_s: float, calibration: ScoreCalibration) -> TreeLimits:
        """Return limits nearer to those at which such trees bring as much as `per_s` tokens a second of all texts."""
        # The slope of passes is taken over a wide range: between two neighbours it would be noise.
        num_texts, growth, passes = now.num_texts, now.costs.growth, now.costs.passes(now.num_texts)
        nodes = num_texts * tree.nodes
        few, many = 0.5 * nodes, max(MIN_RANGE, 1.5 * nodes)
        node_s = (passes.seconds(num_texts + many) - passes.seconds(num_texts + few)) / (many - few)
        _, layer_s, own_s = growth.parts()
        node_tokens = per_s * (max(0.0, node_s) + own_s)
        # All texts share a layer: its draft call, if it is one.
        layer_tokens = per_s * layer_s / num_texts / self._continuation
        return now.limits.nearer_to(
            calibration.score_of(node_tokens),
            calibration.score_of(layer_tokens),
            met=(self._least_score, self._least_gain),
        )
