"""How a run on many workers goes: what is done and left, and how fast each worker is."""

from __future__ import annotations

import time

from edgespec.cli.console import Console, DrawLines
from edgespec.cli.generate.progress import BETWEEN, fitting
from edgespec.cli.generate.tally import Tally
from edgespec.cli.generate.worker import RowAnswer
from edgespec.distributed.worker import Exchange

LOOKED_AT_EVERY_S = 0.5


class WorkersProgress:
    """Shows what workers reported last."""

    def __init__(self, console: Console, tally: Tally, draw: DrawLines) -> None:
        self._console, self._tally, self._draw = console, tally, draw
        self._reported: dict[str, Exchange[RowAnswer]] = {}
        self._looked_at = 0.0

    def update(self, worker: str, reported: Exchange[RowAnswer] | None) -> None:
        """Take what a worker reported; None: it is lost."""
        if reported is None:
            self._reported.pop(worker, None)
        else:
            self._reported[worker] = reported
        now = time.monotonic()
        if now - self._looked_at >= LOOKED_AT_EVERY_S:
            self._looked_at = now
            self._show()

    def _show(self) -> None:
        under_way = {name: count for reported in self._reported.values() for name, count in reported.under_way.items()}
        parts = self._tally.progress(len(under_way), under_way)
        speeds = [f"{worker} {speed(reported):.1f} tok/s" for worker, reported in sorted(self._reported.items())]
        self._console.say_sometimes(BETWEEN.join([*parts, *speeds[:4]]))
        width = self._console.width - 1
        self._draw([fitting(parts, BETWEEN, width), fitting(speeds, ", ", width, more="+{} more") if speeds else ""])


def speed(reported: Exchange[RowAnswer]) -> float:
    """Return the tokens a second of a worker, while it worked."""
    return reported.num_tokens / reported.working_s if reported.working_s else 0.0
