"""Probes of plain decoding while trees are in use: passes without trees, which say what those take here and now.

A pass behind trees finds less in memory than one behind plain passes where memory holds some experts of a mixture: the
first pass of a probe is slower than plain decoding is. So a probe has several, unless the first says that trees are far
ahead.
"""

from __future__ import annotations

PASSES = 3  # of a probe
NEAR = 0.6  # of the speed of trees: where plain decoding is slower, a further pass would change nothing
FIRST_WAIT = 16  # steps before the first probe
MIN_WAIT, MAX_WAIT = 8, 256  # between two
SHARE = 50  # steps for each that a probe costs: 2 %


class PlainProbe:
    """Which of the next passes have no trees."""

    def __init__(self) -> None:
        self._wait, self._passes = FIRST_WAIT, 0

    def is_next(self, speed: float, tokens: float) -> bool:
        """Return whether the next pass is one of a probe.

        `speed` is plain decoding's, as it is known, over that of trees, which yield so many `tokens` a step.
        """
        if self._passes == PASSES or (self._passes and speed < NEAR):
            lost = PASSES * max(0.0, 1 / speed - 1) / tokens  # steps with trees in the time of a whole probe
            self._wait, self._passes = min(MAX_WAIT, max(MIN_WAIT, int(SHARE * lost))), 0
        if self._passes == 0:
            self._wait -= 1
            if self._wait > 0:
                return False
        self._passes += 1
        return True
