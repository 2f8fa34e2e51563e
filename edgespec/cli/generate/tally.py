"""What a run has done so far, and the order in which its records are written."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from edgespec.cli.generate.requests import Request
from edgespec.text.results import GenerationResult

MINUTE_S = 60
HOUR_S = 3600


class Tally:
    """Counts prompts, tokens and passes, and the time since the run began."""

    def __init__(self, num_prompts: int) -> None:
        self.num_prompts = num_prompts
        self.num_done = self.num_failed = self.num_written = 0
        self._results: list[GenerationResult] = []
        self._started = time.perf_counter()

    def add(self, results: Sequence[GenerationResult], *, failed: bool) -> None:
        """Note that a prompt is done."""
        self.num_done += 1
        self.num_failed += failed
        self._results += [] if failed else results

    def summary(self) -> str:
        """Return what all prompts yielded, by the clock."""
        return summary(self._results, total_s=time.perf_counter() - self._started)

    def progress(self, num_texts: int, num_tokens: int) -> str:
        """Return how it goes, with `num_texts` under way, which have so many tokens."""
        elapsed_s = time.perf_counter() - self._started
        tokens = num_tokens + sum(len(result.token_ids) for result in self._results)
        parts = [f"{num_texts} under way", f"{tokens / max(1e-9, elapsed_s):.1f} tok/s"]
        if self.num_done:
            parts.append(f"{_duration(elapsed_s / self.num_done * (self.num_prompts - self.num_done))} left")
        return " · ".join(parts)


class InOrder:
    """Holds records until those of all prompts before them are there."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._order = [request.row.id for request in requests]
        self._held: dict[str, tuple[Request, dict[str, Any]]] = {}
        self._next = 0

    def ready(self, request: Request, record: dict[str, Any]) -> Iterator[tuple[Request, dict[str, Any]]]:
        """Take a record, and yield those whose turn has come."""
        self._held[request.row.id] = request, record
        while self._next < len(self._order) and self._order[self._next] in self._held:
            yield self._held.pop(self._order[self._next])
            self._next += 1


def summary(results: Sequence[GenerationResult], *, total_s: float | None = None) -> str:
    """Return tokens, tokens/s, tokens a pass and text, and passes; seconds are those of all texts, unless given."""
    num_tokens = sum(len(result.token_ids) for result in results)
    total_s = sum(result.total_s for result in results) if total_s is None else total_s
    passes = [step for result in results for step in result.passes]
    parts = [f"{num_tokens} tokens"]
    if total_s:
        parts.append(f"{num_tokens / total_s:.1f} tok/s")
    if passes:
        parts.append(f"{sum(len(step.tokens) for step in passes) / len(passes):.2f} tok/pass")
    return " · ".join([*parts, f"{round(sum(1 / step.num_texts for step in passes))} passes"])


def _duration(seconds: float) -> str:
    if seconds < 2 * MINUTE_S:
        return f"{seconds:.0f} s"
    if seconds < 2 * HOUR_S:
        return f"{seconds / MINUTE_S:.0f} min"
    return f"{seconds / HOUR_S:.1f} h"
