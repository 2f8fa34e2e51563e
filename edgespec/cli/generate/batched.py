"""The prompts of a run that are under way together, until each has its answers."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

from edgespec.cli.console import Console, counted
from edgespec.cli.faults import as_edgespec_error
from edgespec.cli.generate.progress import RunProgress
from edgespec.cli.generate.records import RowRecord, error_record, success_record
from edgespec.cli.generate.requests import EncodeTurn, Request
from edgespec.cli.generate.tally import Totals, totals
from edgespec.cli.generate.turns import RowAnswers
from edgespec.cli.open_engine import engine_trees_in_words
from edgespec.cli.spelling import spelled_error
from edgespec.engine import Engine
from edgespec.errors import EdgespecError
from edgespec.text.handle import TextHandle
from edgespec.text.results import GenerationResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What all prompts have in common."""

    console: Console
    engine: Engine
    predicted_per_s: float | None  # tokens, by the plan of the engine's profile, where that is followed
    fields: dict[str, Any]  # of every record
    encode: EncodeTurn
    num_pressed: Callable[[], int] = lambda: 0  # how often Ctrl-C was pressed

    def check(self) -> None:
        """Raise KeyboardInterrupt where Ctrl-C was pressed: between two texts nothing is lost."""
        if self.num_pressed():
            raise KeyboardInterrupt

    def record(
        self, request: Request, results: Sequence[GenerationResult], error: Exception | None = None
    ) -> RowRecord:
        """Return the record of a prompt that has ended: answered, or by an `error`.

        Raises the error where somebody debugs, unless it is the user's fault.
        """
        if error is None:
            record = success_record(request, self.engine, results, self.fields, self.predicted_per_s)
            return RowRecord(request=request, record=record, totals=totals(results))
        if os.environ.get("EDGESPEC_DEBUG") and not isinstance(error, EdgespecError):
            raise error
        fault = spelled_error(as_edgespec_error(error))
        return RowRecord(request=request, record=error_record(request, results, fault, self.fields), totals=Totals())


class RowsTogether:
    """The rows that share passes; others enter as there is room."""

    def __init__(
        self, run: Run, next_request: Callable[[], Request | None], *, progress: RunProgress | None = None
    ) -> None:
        """Begin with none: `next_request` returns one where any waits. `progress` shows how it goes."""
        self._run, self._next_request, self._progress = run, next_request, progress
        self._under_way: dict[TextHandle, RowAnswers] = {}

    @property
    def rows(self) -> list[RowAnswers]:
        """Return the rows that have begun and not ended."""
        return list(self._under_way.values())

    def step(self) -> Generator[RowRecord, None, bool]:
        """Make one pass and yield the rows that ended; return whether there are others.

        Raises KeyboardInterrupt where texts were cancelled, behind those that ended before.
        """
        run, under_way = self._run, self._under_way
        while len(under_way) < run.engine.run_config.num_texts:
            request = self._next_request()
            if request is None:
                break
            reads = None if self._progress is None else self._progress.reads(request)
            yield from self._begin(RowAnswers(run.engine, request, run.encode, on_prefill=reads))
        if not under_way:
            return False
        with saying_memory(run):
            num_texts = run.engine.advance()
        if self._progress is not None and not run.num_pressed():  # else what the key was answered with is drawn over
            self._progress.show(num_texts, self.rows)
        ended = [handle for handle in under_way if handle.is_done]
        going_on: list[RowAnswers] = []  # behind those that ended, which Ctrl-C must not lose
        for handle in sorted(ended, key=lambda handle: handle.whole().finish_reason == "interrupted"):
            row = under_way.pop(handle)
            if handle.error is not None:
                yield run.record(row.request, row.results, handle.error)
                continue
            row.take(handle)
            say_trees(run, row.results[-1])
            if row.is_done:
                yield run.record(row.request, row.results)
            else:
                going_on.append(row)
        for row in going_on:
            yield from self._begin(row)
        return True

    def close(self) -> None:
        """End all texts."""
        for handle in self._under_way:
            handle.cancel()

    def _begin(self, row: RowAnswers) -> Iterator[RowRecord]:
        """Ask for a row's next answer; yields the row where that fails."""
        self._run.check()
        try:
            self._under_way[row.next_turn()] = row
        except Exception as error:
            yield self._run.record(row.request, row.results, error)


def together(run: Run, requests: Iterable[Request], progress: RunProgress) -> Generator[RowRecord, None, None]:
    """Yield prompts in the order in which they end; as many are under way as the engine has room for.

    `progress` shows how it goes. Raises KeyboardInterrupt where texts were cancelled, behind those that ended before.
    """
    with closing(RowsTogether(run, functools.partial(next, iter(requests), None), progress=progress)) as rows:
        while (yield from rows.step()):
            pass


@contextmanager
def saying_memory(run: Run) -> Iterator[None]:
    """Within this block it is said where memory ran out, and trees became smaller or texts fewer."""
    engine, largest_tree, num_texts = run.engine, run.engine.largest_tree, run.engine.num_texts
    before = engine_trees_in_words(engine)
    yield
    if engine.num_texts < num_texts:
        is_first = num_texts == engine.run_config.num_texts
        say = run.console.say if is_first else run.console.detail  # each step further down is no news
        now = counted(engine.num_texts, "text")
        say(f"memory ran out in a pass: at most {now} under way from here on, no longer {num_texts}")
    if engine.largest_tree != largest_tree:
        run.console.say(f"memory ran out in a pass: {engine_trees_in_words(engine)} from here on, no longer {before}")


def say_trees(run: Run, result: GenerationResult) -> None:
    """Say in detail what trees such texts have."""
    trees = run.engine.trees_in_use(result.sampling)
    if trees is not None:
        run.console.detail(trees)
