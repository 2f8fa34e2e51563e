"""How a run on many workers goes: what is done and left, and how fast each worker is."""

from __future__ import annotations

import time

from edgespec.cli.console import Console, DrawLines
from edgespec.cli.generate.progress import BETWEEN, fitting
from edgespec.cli.generate.tally import Tally
from edgespec.cli.generate.worker import RowAnswer
from edgespec.distributed.worker import Exchanged

LOOKED_AT_EVERY_S = 0.5


class WorkersProgress:
    """Shows what workers told last."""

    def __init__(self, console: Console, tally: Tally, draw: DrawLines) -> None:
        self._console, self._tally, self._draw = console, tally, draw
        self._told: dict[str, Exchanged[RowAnswer]] = {}
        self._looked_at = 0.0

    def update(self, worker: str, told: Exchanged[RowAnswer] | None) -> None:
        """Take what a worker told; None: it is lost."""
        if told is None:
            self._told.pop(worker, None)
        else:
            self._told[worker] = told
        now = time.monotonic()
        if now - self._looked_at >= LOOKED_AT_EVERY_S:
            self._looked_at = now
            self._show()

    def _show(self) -> None:
        under_way = {name: count for told in self._told.values() for name, count in told.under_way.items()}
        parts = self._tally.progress(len(under_way), under_way)
        speeds = [f"{worker} {speed(told):.1f} tok/s" for worker, told in sorted(self._told.items())]
        self._console.say_sometimes(BETWEEN.join([*parts, *speeds[:4]]))
        width = self._console.width - 1
        self._draw([fitting(parts, BETWEEN, width), fitting(speeds, ", ", width, more="+{} more") if speeds else ""])


def speed(told: Exchanged[RowAnswer]) -> float:
    """Return the tokens a second of a worker, while it worked."""
    return told.num_tokens / told.working_s if told.working_s else 0.0
