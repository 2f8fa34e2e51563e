"""What steps without a draft would bring beside roots alone: looked up text has its tokens in them, and its rows."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from edgespec.tuning.step import steps_since

MEMORY = 0.98  # of the means, a step
PRIOR_STEPS = 8.0  # of roots alone
FIRST_LOOKS = 16  # by all texts together, which show what looking up brings
CLEAR = 1.03  # times as fast in company: means are of few looks of each text
FIRST_WAIT, LONGEST_WAIT = 16, 64  # steps before it is seen again whether looking up pays; each wait doubles


class Look(enum.Enum):
    """What the texts of a step do with the text that they have."""

    USED = enum.auto()  # what is found is in the tree
    SEEN = enum.auto()  # what is found is compared with the tokens that come, and has no rows
    NONE = enum.auto()


@dataclass(slots=True)
class _Known:
    """About so many texts."""

    tokens: float = PRIOR_STEPS  # a text
    worth: float = PRIOR_STEPS  # of these tokens, where one of each text is worth the pass of roots
    passes: float = PRIOR_STEPS  # of roots, that they took
    num_looks: int = 0
    num_left_out: int = 0  # steps since the last look
    wait: int = FIRST_WAIT


class LookupGain:
    """How many times the tokens a second of roots alone such steps have had, by the octave of texts.

    It is learned from all steps, those with a draft's trees too: what is looked up is known there, and what it brings.
    """

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        self._step: int | None = None
        self._look = Look.USED

    def learn(self, num_texts: int, tokens: int, added: float, *, weight: float = 1.0) -> None:
        """Note a text's tokens in a step, and what share of a pass of roots alone it added by its looked up rows.

        Tokens beyond the first have this `weight`: those of a text that is ahead bring the end of all hardly nearer.
        """
        known, share = self._of(num_texts), 1 / num_texts
        memory = 1 - (1 - MEMORY) * share
        known.tokens = memory * known.tokens + share * tokens
        known.worth = memory * known.worth + share * (1 + weight * (tokens - 1))
        known.passes = memory * known.passes + share + added
        known.num_looks += 1

    def of(self, num_texts: int) -> float:
        """Return the gain of steps that this number of texts share."""
        known = self._known.get(num_texts.bit_length())
        return 1.0 if known is None else max(1.0, known.tokens / known.passes)

    def pays(self, num_texts: int) -> bool:
        """Return whether looking up pays in steps of so many texts, or has not been seen often enough."""
        known, clear = self._of(num_texts), 1.0 if num_texts == 1 else CLEAR
        return known.num_looks < FIRST_LOOKS or known.worth >= clear * known.passes

    def look(self, step: int, num_texts: int, may_begin: Callable[[], bool], first: Callable[[], Look]) -> Look:
        """Return what the texts of the step with this number do, decided once for all of them.

        They do nothing before rows have a price, when `may_begin`. The `first` looks show what looking up brings.
        """
        if step != self._step:
            passed, self._step = steps_since(self._step, step), step
            self._look = self._next(self._of(num_texts), num_texts, passed, first) if may_begin() else Look.NONE
        return self._look

    def _next(self, known: _Known, num_texts: int, passed: int, first: Callable[[], Look]) -> Look:
        if self.pays(num_texts):
            known.num_left_out, known.wait = 0, FIRST_WAIT
            return first() if known.num_looks < FIRST_LOOKS else Look.USED
        known.num_left_out += passed
        if known.num_left_out < known.wait:
            return Look.NONE
        known.num_left_out, known.wait = 0, min(2 * known.wait, LONGEST_WAIT)
        return Look.SEEN

    def _of(self, num_texts: int) -> _Known:
        return self._known.setdefault(num_texts.bit_length(), _Known())
