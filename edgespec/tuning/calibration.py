"""How a tree's scores compare with what verification accepts.

Scores are chances of acceptance in another model: of the built-in pair, or the draft's own probabilities. What
was accepted over the sum of the scores, by the size of the score, turns them into expected tokens of this pair.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

CLASSES = 10  # of scores: octaves down from 1
MEMORY = 0.98  # of the sums, a tree: about fifty trees
PRIOR_TOKENS = 2.0  # on both sides of a ratio, so that a few bad trees are no verdict
CERTAIN = 0.999  # no chance is larger


@dataclass(frozen=True, slots=True)
class GrownTree:
    """The scores of a text's tree."""

    scores: list[float]  # of the nodes below the root
    layers: list[int]
    limit: int
    is_typical: bool  # no tree that ends with its text


class ScoreCalibration:
    """The ratios of accepted to expected tokens, by class of score."""

    def __init__(self, promised: Sequence[float] = (0.0,) * CLASSES, kept: Sequence[float] = (0.0,) * CLASSES) -> None:
        """Begin with these sums of tokens by class of score, as were known before."""
        self.promised, self.kept = list(promised), list(kept)
        self.ratios = self._found()

    def expected(self, scores: Sequence[float]) -> list[float]:
        """Return the expected tokens of nodes."""
        ratios = self.ratios
        return [min(CERTAIN, score * ratios[_class_of(score)]) for score in scores]

    def best_first(self, trees: Sequence[GrownTree]) -> tuple[list[float], list[int]]:
        """Return the expected tokens and the layers of all trees' nodes, best score first."""
        scores = [score for tree in trees for score in tree.scores]
        layers = [layer for tree in trees for layer in tree.layers]
        expected = self.expected(scores)
        order = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
        return [expected[n] for n in order], [layers[n] for n in order]

    def score_of(self, expected: float) -> float:
        """Return the score of nodes that are worth this number of tokens."""
        return expected / self.ratios[_class_of(expected)]

    def learn(self, scores: Sequence[float], accepted: Sequence[bool]) -> None:
        """Compare the scores of a verified tree's nodes with the accepted ones."""
        promised, kept = [0.0] * CLASSES, [0.0] * CLASSES
        for score, is_kept in zip(scores, accepted, strict=True):
            found = _class_of(score)
            promised[found] += score
            kept[found] += is_kept
        self.promised = [MEMORY * old + new for old, new in zip(self.promised, promised, strict=True)]
        self.kept = [MEMORY * old + new for old, new in zip(self.kept, kept, strict=True)]
        self.ratios = self._found()

    def _found(self) -> list[float]:
        overall = (sum(self.kept) + PRIOR_TOKENS) / (sum(self.promised) + PRIOR_TOKENS)
        return [
            (kept + PRIOR_TOKENS * overall) / (promised + PRIOR_TOKENS)
            for kept, promised in zip(self.kept, self.promised, strict=True)
        ]


def _class_of(score: float) -> int:
    return min(CLASSES - 1, max(0, int(-math.log2(max(score, 1e-9)))))
