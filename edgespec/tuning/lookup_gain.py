"""What steps without a draft would bring beside roots alone: looked up text has its tokens in them, and its rows."""

from __future__ import annotations

import math

MEMORY = 0.98  # of the means, a step
PRIOR_STEPS = 8.0  # of roots alone
FIRST_LOOKS = 16  # by all texts together, which show what looking up brings
COMPANY_GAIN = 0.04  # for each doubling of the texts: those that are ahead of others bring the end of all no nearer


class LookupGain:
    """How many times the tokens a second of roots alone such steps have had, by the octave of texts.

    It is learned from all steps, those with a draft's trees too: what is looked up is known there, and what it brings.
    """

    def __init__(self) -> None:
        self._sums: dict[int, tuple[float, float]] = {}  # tokens a text, and the passes of roots that they took
        self._num_looks: dict[int, int] = {}

    def learn(self, num_texts: int, tokens: int, added: float) -> None:
        """Note a text's tokens in a step, and what share of a pass of roots alone it added by its looked up rows."""
        octave, share = num_texts.bit_length(), 1 / num_texts
        tokens_known, passes_known = self._sums.get(octave, (PRIOR_STEPS, PRIOR_STEPS))
        memory = 1 - (1 - MEMORY) * share
        self._sums[octave] = memory * tokens_known + share * tokens, memory * passes_known + share + added
        self._num_looks[octave] = self._num_looks.get(octave, 0) + 1

    def of(self, num_texts: int) -> float:
        """Return the gain of steps that this number of texts share."""
        tokens, passes = self._sums.get(num_texts.bit_length(), (1.0, 1.0))
        return max(1.0, tokens / passes)

    def pays(self, num_texts: int) -> bool:
        """Return whether looking up pays in steps of so many texts, or has not been seen often enough."""
        is_seen = self._num_looks.get(num_texts.bit_length(), 0) >= FIRST_LOOKS
        return not is_seen or self.of(num_texts) >= 1 + COMPANY_GAIN * math.log2(num_texts)
