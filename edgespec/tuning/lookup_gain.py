"""What steps without a draft would bring beside roots alone: looked up text has its tokens in them, and its rows."""

from __future__ import annotations

MEMORY = 0.98  # of the means, a step
PRIOR_STEPS = 8.0  # of roots alone


class LookupGain:
    """How many times the tokens a second of roots alone such steps have had, by the octave of texts.

    It is learned from all steps, those with a draft's trees too: what is looked up is known there, and what it brings.
    """

    def __init__(self) -> None:
        self._sums: dict[int, tuple[float, float]] = {}  # tokens a text, and the passes of roots that they took

    def learn(self, num_texts: int, tokens: int, added: float) -> None:
        """Note a text's tokens in a step, and what share of a pass of roots alone its looked up rows added to it."""
        known = self._sums.get(num_texts.bit_length(), (PRIOR_STEPS, PRIOR_STEPS))
        memory = MEMORY ** (1 / num_texts)
        self._sums[num_texts.bit_length()] = (
            memory * known[0] + tokens / num_texts,
            memory * known[1] + 1 / num_texts + added,
        )

    def of(self, num_texts: int) -> float:
        """Return the gain of steps that this number of texts share."""
        tokens, passes = self._sums.get(num_texts.bit_length(), (1.0, 1.0))
        return tokens / passes
