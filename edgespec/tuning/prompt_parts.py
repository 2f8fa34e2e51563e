"""How many rows of prompts a pass reads: so many that reading stays fast, and so few that nobody waits long for it.

A pass takes some seconds by itself, and some for each row. Both are measured; a part's length doubles with them. Parts
end at fixed tokens of a text, so that no sum of a row depends on the clock that decides here.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping

from edgespec.tuning.step import PassCost

SHARED_S = 0.5  # that a text waits for a part of another's prompt
ALONE_S = 1.5  # that a newcomer waits for a part that nobody shares
OVERHEAD = 0.03  # of a part's seconds, most that the pass takes by itself where nobody shares it
MOST_ROWS = 8192  # of a part


class PromptParts:
    """The seconds of passes, and the part that they allow."""

    def __init__(self, *, reads_once: bool) -> None:
        """Know nothing; `reads_once`: a pass is dear, and prompts are read whole until it is known that parts pay."""
        self.reads_once = reads_once
        self._pass_s: deque[float] = deque(maxlen=9)  # of passes without prompts
        self._row_s: deque[float] = deque(maxlen=3)

    def observe(self, cost: PassCost) -> None:
        """Learn from a pass."""
        if cost.num_prompt_rows:
            self.observe_rows(cost.num_prompt_rows, cost.target_s)
        elif cost.num_texts:
            self._pass_s.append(cost.target_s)

    def observe_rows(self, rows: int, seconds: float) -> None:
        """Learn from a pass that read so many rows of prompts."""
        self._row_s.append(max(0.0, seconds - self.by_itself_s) / rows)

    def num_rows(self, unit: int, *, is_shared: bool) -> int | None:
        """Return the rows of a part, a power of two times `unit`; None for all of a prompt.

        `is_shared`: other texts wait for the pass.
        """
        if not self._row_s or (self.reads_once and not self._pass_s):
            return None if self.reads_once else unit
        by_itself_s, row_s = self.by_itself_s, statistics.median_low(self._row_s)
        sizes = [unit << octave for octave in range(max(1, (MOST_ROWS // unit).bit_length()))]
        seconds = {rows: by_itself_s + row_s * rows for rows in sizes}
        found = _most_within(SHARED_S, seconds)
        if self.reads_once or not is_shared:
            paying = next((rows for rows in sizes if by_itself_s <= OVERHEAD * seconds[rows]), sizes[-1])
            found = max(found, paying if self.reads_once else min(paying, _most_within(ALONE_S, seconds)))
        return None if self.reads_once and found == sizes[-1] else found

    @property
    def by_itself_s(self) -> float:
        """The seconds of a pass without prompts; 0 before the first."""
        return statistics.median_low(self._pass_s) if self._pass_s else 0.0


def _most_within(most_s: float, seconds: Mapping[int, float]) -> int:
    """Return the largest size that takes no longer; the smallest one where none does."""
    return max((rows for rows, found_s in seconds.items() if found_s <= most_s), default=min(seconds))
