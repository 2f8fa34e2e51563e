"""What a run has done so far, and what is left of it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgespec.cli.console import counted
from edgespec.cli.generate.requests import Request

if TYPE_CHECKING:
    from edgespec.text.results import GenerationResult

MINUTE_S = 60
HOUR_S = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums over answers, all that a run keeps of them."""

    tokens: int = 0
    seconds: float = 0.0  # of each text by itself
    pass_tokens: int = 0  # that came from passes
    text_passes: int = 0  # a pass of two texts counts twice
    passes: float = 0.0  # a pass of two texts counts once

    def __add__(self, other: Totals) -> Totals:
        return Totals(
            tokens=self.tokens + other.tokens,
            seconds=self.seconds + other.seconds,
            pass_tokens=self.pass_tokens + other.pass_tokens,
            text_passes=self.text_passes + other.text_passes,
            passes=self.passes + other.passes,
        )

    def in_words(self, *, by_clock_s: float | None = None) -> str:
        """Return tokens, tokens/s, tokens a pass and text, and passes; seconds are the texts' own, unless given."""
        total_s = self.seconds if by_clock_s is None else by_clock_s
        parts = [counted(self.tokens, "token")]
        if total_s:
            parts.append(f"{self.tokens / total_s:.1f} tok/s")
        if self.text_passes:
            parts.append(f"{self.pass_tokens / self.text_passes:.2f} tok/pass")
        return " · ".join([*parts, counted(round(self.passes), "pass")])


def totals(results: Iterable[GenerationResult]) -> Totals:
    """Return the sums over answers."""
    found = list(results)
    passes = [step for result in found for step in result.passes]
    return Totals(
        tokens=sum(len(result.token_ids) for result in found),
        seconds=sum(result.total_s for result in found),
        pass_tokens=sum(len(step.tokens) for step in passes),
        text_passes=len(passes),
        passes=sum(1 / step.num_texts for step in passes),
    )


class Tally:
    """Counts prompts, tokens and passes, and the time since the run began."""

    def __init__(self, requests: Sequence[Request], *, max_context: int) -> None:
        self.num_prompts = len(requests)
        self.num_done = self.num_failed = self.num_written = 0
        self._open = {request.row.id: most_tokens(request, max_context) for request in requests}
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

        `num_texts` share the next pass; prompts `under_way` have so many tokens, by their ids. The time left is that
        of the tokens to come: of what a prompt may still have, as large a share as those that are done used.
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


def most_tokens(request: Request, max_context: int) -> int:
    """Return the most tokens that a prompt's answers may have together."""
    if request.fault is not None:
        return 0
    room = max(0, max_context - len(request.ids))
    each = room if request.max_new_tokens < 0 else request.max_new_tokens
    return min(room, each * request.row.num_turns)


def duration(seconds: float) -> str:
    """Return seconds in the unit that people would use."""
    if seconds < 2 * MINUTE_S:
        return f"{seconds:.0f} s"
    if seconds < 2 * HOUR_S:
        return f"{seconds / MINUTE_S:.0f} min"
    return f"{seconds / HOUR_S:.1f} h"
