"""Drafts read long texts in parts, before their trees: a text waits for its own draft, and others for a part of it.

How long a pass over such a part takes is measured; a step has as many as take no longer than the target's own pass, or
half a second. Parts end at fixed tokens of a text, so that the clock changes no sum of a row.
"""

import time
from collections import abc

from edgespec.decode.sequence import Sequence
from edgespec.draft.language_model import LanguageModelDrafter
from edgespec.grow import Growth
from edgespec.grow.beam import Beam
from edgespec.grow.merged import Merged
from edgespec.tree.token_tree import TokenTree
from edgespec.tuning.prompt_parts import MOST_ROWS, SHARED_S, PromptParts


class DraftReading:
    """The parts that drafts read, of all texts that are under way."""

    def __init__(self) -> None:
        """Know nothing of the seconds."""
        self._parts = PromptParts(reads_once=False)
        self._left_s = 0.0  # of the running step

    def begin_step(self, beside_s: float) -> None:
        """Begin a step, whose pass over the target's weights takes about these seconds."""
        self._left_s = max(SHARED_S, beside_s)

    def read(self, sequences: abc.Sequence[Sequence]) -> None:
        """Let drafts read what is too long for the pass of their trees' roots, as far as the step has time.

        Texts whose draft has more to read have `reads_draft` then.
        """
        while (waiting := self._beyond(sequences)) and self._left_s > 0:
            for sequence in waiting:
                sequence.reads_draft = True
            started = time.perf_counter()
            _read_part(waiting, self._part(waiting[0]), self._parts)
            seconds = time.perf_counter() - started
            self._left_s -= seconds
            for sequence in waiting:
                sequence.draft_read_s += seconds
        for sequence in sequences:
            sequence.reads_draft = sequence in waiting or sequence.target.is_left_out

    def _part(self, sequence: Sequence) -> int:
        rows = self._parts.num_rows(_drafter(sequence).part_rows, is_shared=True)
        return MOST_ROWS if rows is None else rows

    def _beyond(self, sequences: abc.Sequence[Sequence]) -> list[Sequence]:
        """Return the texts that the pass of the roots has no room for: it has that of a part."""
        unread = [one for one in sequences if isinstance(one.drafter, LanguageModelDrafter)]
        unread = [one for one in unread if not one.target.is_left_out]
        if not unread:
            return []
        rows_left = self._part(unread[0])
        found = []
        for sequence in sorted(unread, key=lambda one: _drafter(one).num_pending):
            drafter = _drafter(sequence)
            if drafter.num_pending > max(rows_left, drafter.part_rows):
                found.append(sequence)
            else:
                rows_left -= drafter.num_pending
        return found


def asks_draft(sequence: Sequence, growth: Growth) -> bool:
    """Return whether a text's tree needs the draft."""
    drafted = growth.drafted if isinstance(growth, Merged) else growth
    if isinstance(drafted, TokenTree):
        return False
    return drafted.depth > 0 if isinstance(drafted, Beam) else sequence.max_depth(sequence.num_left - 1) > 0


def num_unread(sequence: Sequence) -> int:
    """Return how many of the text's tokens, from before the last step, the draft has not read."""
    return sequence.drafter.num_unread if isinstance(sequence.drafter, LanguageModelDrafter) else 0


def _drafter(sequence: Sequence) -> LanguageModelDrafter:
    assert isinstance(sequence.drafter, LanguageModelDrafter)
    return sequence.drafter


def _read_part(sequences: abc.Sequence[Sequence], max_rows: int, parts: PromptParts) -> None:
    """Make a pass of at most `max_rows` rows, those of the first texts; each ends where a part may end."""
    reading: list[tuple[LanguageModelDrafter, int]] = []
    started = time.perf_counter()
    num_rows = 0
    for drafter in map(_drafter, sequences):
        most = min(drafter.num_pending, max_rows - num_rows)
        count = (drafter.num_read + most) // drafter.part_rows * drafter.part_rows - drafter.num_read
        if count > 0:
            reading.append((drafter, count))
            num_rows += count
    hidden = reading[0][0].model.read([drafter.text_rows(count) for drafter, count in reading])
    bool(hidden[-1][-1, 0].isfinite())  # one wait for the device: so the seconds are honest
    for drafter, count in reading:
        drafter.took_text(count)
    parts.observe_rows(num_rows, time.perf_counter() - started)
