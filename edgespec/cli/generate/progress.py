"""How a run of many prompts goes: counts, in lines that a terminal draws over, elsewhere in a line now and then."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from edgespec.cli.console import Console, DrawLines, counted
from edgespec.cli.generate.records import Totals
from edgespec.cli.generate.requests import Request
from edgespec.cli.prefill_line import PrefillLine
from edgespec.cli.standard_streams import visible
from edgespec.distributed.worker import Exchange

if TYPE_CHECKING:
    from edgespec.text.handle import OnPrefill

BETWEEN = " · "
MINUTE_S = 60
HOUR_S = 3600
DRAWN_EVERY_S = 0.1
WORKERS_EVERY_S = 0.5


class Tally:
    """Counts prompts, tokens and passes, and the time since the run began."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.num_prompts = len(requests)
        self.num_done = self.num_failed = 0
        self._open = {request.row.id: request.most_tokens for request in requests}
        self._open_most = sum(self._open.values())
        self._ended_most = 0  # tokens that the prompts that are done might have had
        self._totals = Totals()
        self._started = time.perf_counter()

    def add(self, request: Request, found: Totals, *, failed: bool) -> None:
        """Note that a prompt is done."""
        most = self._open.pop(request.row.id)
        self._open_most -= most
        self.num_done += 1
        self.num_failed += failed
        if not failed:
            self._ended_most += most
            self._totals += found

    def most_of(self, name: str) -> int:
        """Return the most tokens that a prompt's answers may have, by its id."""
        return self._open[name]

    def summary(self) -> str:
        """Return what all prompts yielded, by the clock."""
        return self._totals.in_words(by_clock_s=time.perf_counter() - self._started)

    def progress(self, num_texts: int, under_way: Mapping[str, int]) -> list[str]:
        """Return in a few words each how it goes, the most important first.

        `num_texts` share the next pass; `under_way` has the tokens of prompts so far, by their ids. The time left is
        that of the tokens to come: of what a prompt may still have, as large a share as those that are done used.
        """
        elapsed_s = max(1e-9, time.perf_counter() - self._started)
        ended = self._totals.tokens
        tokens = ended + sum(under_way.values())
        parts = [f"{self.num_done} of {counted(self.num_prompts, 'prompt')}"]
        if tokens:
            share = ended / self._ended_most if self._ended_most else 1.0
            to_come = share * (self._open_most - sum(under_way.values()))
            left = f"{duration(to_come * elapsed_s / tokens)} left"
            parts += [left if self._ended_most else f"at most {left}", f"{tokens / elapsed_s:.1f} tok/s"]
        return [*parts, f"{num_texts} under way", counted(tokens, "token")]


class RunProgress:
    """Shows how many prompts are done, those under way, and how much of their texts is read."""

    def __init__(self, console: Console, tally: Tally, draw: DrawLines) -> None:
        self._console, self._tally, self._draw = console, tally, draw
        self._reading = PrefillLine(console, draw=self._show_reading)
        self._counts: dict[str, tuple[int, int]] = {}  # of prompts being read: tokens that are read, of how many
        self._lines: list[str] = []
        self._read_line = ""
        self._drawn = 0.0

    def show(self, num_texts: int, tokens: Mapping[str, int], *, are_read: bool) -> None:
        """Show rows by their tokens, and that `num_texts` share the next pass; `are_read` says it of all prompts."""
        if are_read:
            self._reading.end()
            self._counts.clear()
            self._reading.begin()
        parts = self._tally.progress(num_texts, tokens)
        self._console.say_sometimes(BETWEEN.join(parts))
        texts = [f"{visible(name)} {count}/{self._tally.most_of(name)}" for name, count in tokens.items()]
        self._lines = [fitting(parts, BETWEEN, self._console.width - 1)]
        if texts:
            self._lines.append(fitting(texts, ", ", self._console.width - 1, more="+{} more"))
        now = time.monotonic()
        if now - self._drawn >= DRAWN_EVERY_S:
            self._drawn = now
            self._draw_all()

    def reads(self, request: Request) -> OnPrefill:
        """Return the function to call with the number of tokens of this row's prompt that are read."""
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


def duration(seconds: float) -> str:
    """Return seconds in the unit that people would use."""
    if seconds < 2 * MINUTE_S:
        return f"{seconds:.0f} s"
    if seconds < 2 * HOUR_S:
        return f"{seconds / MINUTE_S:.0f} min"
    return f"{seconds / HOUR_S:.1f} h"
