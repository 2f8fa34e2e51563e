"""What steps without a draft bring beside roots alone: looked up text has its tokens in them, and its rows."""

from __future__ import annotations

MEMORY = 0.98  # of the means, a step
PRIOR_STEPS = 8.0  # of roots alone


class LookupGain:
    """How many times the tokens a second of roots alone such steps have had, by the octave of texts."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[float, float]] = {}  # tokens a text, and the passes of roots that they took

    def learn(self, num_texts: int, tokens: int, passes: float) -> None:
        """Note a step, which took as long as so many passes of roots alone."""
        known = self._sums.get(num_texts.bit_length(), (PRIOR_STEPS, PRIOR_STEPS))
        self._sums[num_texts.bit_length()] = (MEMORY * known[0] + tokens / num_texts, MEMORY * known[1] + passes)

    def of(self, num_texts: int) -> float:
        """Return the gain of steps that this number of texts share."""
        tokens, passes = self._sums.get(num_texts.bit_length(), (1.0, 1.0))
        return tokens / passes
