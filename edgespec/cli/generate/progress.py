"""How a run of many prompts goes: lines that a terminal draws over, elsewhere a line now and then."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence
from typing import Any

from edgespec.cli.console import Console, DrawLines
from edgespec.cli.generate.requests import Request
from edgespec.cli.generate.tally import Tally
from edgespec.cli.generate.turns import RowAnswers
from edgespec.cli.prefill_line import PrefillLine
from edgespec.cli.standard_streams import visible
from edgespec.distributed.worker import Exchange
from edgespec.text.handle import OnPrefill

BETWEEN = " · "
DRAWN_EVERY_S = 0.1
WORKERS_EVERY_S = 0.5


class RunProgress:
    """Shows what is done and what is left, the prompts under way, and how much of their prompts is read."""

    def __init__(self, console: Console, tally: Tally, draw: DrawLines) -> None:
        self._console, self._tally, self._draw = console, tally, draw
        self._reading = PrefillLine(console, draw=self._show_reading)
        self._counts: dict[str, tuple[int, int]] = {}  # of prompts being read: tokens that are read, of how many
        self._lines: list[str] = []
        self._read_line = ""
        self._drawn = 0.0

    def show(self, num_texts: int, rows: Sequence[RowAnswers]) -> None:
        """Show these rows, of which `num_texts` share the next pass."""
        if all(row.is_read for row in rows):
            self._reading.end()
            self._counts.clear()
            self._reading.begin()
        under_way = {row.request.row.id: row.num_tokens for row in rows if row.is_under_way}
        parts = self._tally.progress(num_texts, under_way)
        self._console.say_sometimes(BETWEEN.join(parts))
        texts = [f"{visible(name)} {count}/{self._tally.most_of(name)}" for name, count in under_way.items()]
        self._lines = [fitting(parts, BETWEEN, self._console.width - 1)]
        if texts:
            self._lines.append(fitting(texts, ", ", self._console.width - 1, more="+{} more"))
        now = time.monotonic()
        if now - self._drawn >= DRAWN_EVERY_S:
            self._drawn = now
            self._draw_all()

    def reads(self, request: Request) -> OnPrefill:
        """Return what is told how much of this row's prompt is read."""
        return functools.partial(self._update_reading, request.row.id)

    def _update_reading(self, row: str, done_tokens: int, num_tokens: int) -> None:
        self._counts[row] = done_tokens, num_tokens
        done, total = zip(*self._counts.values(), strict=True)
        self._reading.update(sum(done), sum(total))

    def _show_reading(self, text: str) -> None:
        self._read_line = text
        self._draw_all()

    def _draw_all(self) -> None:
        self._draw([*self._lines, *([self._read_line] if self._read_line else [])])


class WorkersProgress:
    """Shows what workers reported last."""

    def __init__(self, console: Console, tally: Tally, draw: DrawLines) -> None:
        self._console, self._tally, self._draw = console, tally, draw
        self._reported: dict[str, Exchange[Any]] = {}
        self._shown_at = 0.0

    def update(self, worker: str, reported: Exchange[Any] | None) -> None:
        """Take what a worker reported; None: it is lost."""
        if reported is None:
            self._reported.pop(worker, None)
        else:
            self._reported[worker] = reported
        now = time.monotonic()
        if now - self._shown_at >= WORKERS_EVERY_S:
            self._shown_at = now
            self._show()

    def _show(self) -> None:
        under_way = {name: count for reported in self._reported.values() for name, count in reported.under_way.items()}
        parts = self._tally.progress(len(under_way), under_way)
        speeds = [  # while they worked
            f"{worker} {reported.num_tokens / (reported.working_s or math.inf):.1f} tok/s"
            for worker, reported in sorted(self._reported.items())
        ]
        self._console.say_sometimes(BETWEEN.join([*parts, *speeds[:4]]))
        width = self._console.width - 1
        self._draw([fitting(parts, BETWEEN, width), fitting(speeds, ", ", width, more="+{} more") if speeds else ""])


def fitting(parts: Sequence[str], between: str, width: int, *, more: str = "") -> str:
    """Return as many of the parts as one line holds, and how many `more` there are; the first is cut to fit."""
    for count in range(len(parts), 0, -1):
        left = [more.format(len(parts) - count)] if more and count < len(parts) else []
        line = between.join([*parts[:count], *left])
        if len(line) <= width:
            return line
    return parts[0][: max(0, width)]
