"""The limits of a step's trees: their size, and the least score of a node and the least gain of a layer."""

from __future__ import annotations

import math
from dataclasses import dataclass

LIMITS_AN_OCTAVE = 4
MIN_SCORE, MAX_SCORE = 1e-3, 0.25  # of a node; a limit below the first is none
MIN_GAIN, MAX_GAIN = 1 / 16, 2.0  # of a layer


@dataclass(frozen=True, slots=True)
class TreeLimits:
    """The limits of the next tree."""

    size: int
    threshold: float = 0.0
    stop_gain: float = 0.0

    def nearer_to(self, score: float, gain: float, *, met: tuple[float, float]) -> TreeLimits:
        """Return limits nearer to a node's `score` and a layer's `gain`; the last tree has `met` such ones."""
        return TreeLimits(
            self.size,
            _moved(self.threshold, met[0], score, MIN_SCORE, MAX_SCORE),
            _moved(self.stop_gain, met[1], gain, MIN_GAIN, MAX_GAIN),
        )


def _moved(now: float, met: float, best: float, least: float, most: float) -> float:
    """Return a limit nearer to the best one, by a factor of two at most; below `least` there is none.

    The last tree may have met a higher limit than the one that there is `now`.
    """
    low, high = now / 2, max(now, met, least) * 2
    found = min(max(best, low), high, most)
    # Few different limits: the settings of each are made once.
    return 0.0 if found < least else 2 ** (round(LIMITS_AN_OCTAVE * math.log2(found)) / LIMITS_AN_OCTAVE)
