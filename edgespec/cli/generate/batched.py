"""The prompts of a run that are under way together, until each has its answers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from edgespec.cli.console import Console, counted
from edgespec.cli.generate.progress import RunProgress
from edgespec.cli.generate.requests import EncodeTurn, Request, RunSettings
from edgespec.cli.generate.turns import RowAnswers
from edgespec.cli.open_engine import engine_trees_in_words
from edgespec.engine import Engine
from edgespec.text.handle import TextHandle
from edgespec.text.results import GenerationResult

RowEnd: TypeAlias = tuple[Request, list[GenerationResult], Exception | None]  # a prompt's answers, or what ended it


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What all prompts have in common."""

    console: Console
    engine: Engine
    settings: RunSettings
    fields: dict[str, Any]  # of every record
    encode: EncodeTurn
    num_pressed: Callable[[], int]  # how often Ctrl-C was pressed

    def check(self) -> None:
        """Raise KeyboardInterrupt where Ctrl-C was pressed: between two texts nothing is lost."""
        if self.num_pressed():
            raise KeyboardInterrupt


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

    def step(self) -> Generator[RowEnd, None, bool]:
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
        with saying_room(run):
            num_texts = run.engine.advance()
        if self._progress is not None and not run.num_pressed():  # else what the key was answered with is drawn over
            self._progress.show(num_texts, self.rows)
        ended = [handle for handle in under_way if handle.is_done]
        going_on: list[RowAnswers] = []  # behind those that ended, which Ctrl-C must not lose
        for handle in sorted(ended, key=lambda handle: handle.whole().finish_reason == "interrupted"):
            row = under_way.pop(handle)
            if handle.error is not None:
                yield row.request, row.results, handle.error
                continue
            row.take(handle)
            say_trees(run, row.results[-1])
            if row.is_done:
                yield row.request, row.results, None
            else:
                going_on.append(row)
        for row in going_on:
            yield from self._begin(row)
        return True

    def close(self) -> None:
        """End all texts."""
        for handle in self._under_way:
            handle.cancel()

    def _begin(self, row: RowAnswers) -> Iterator[RowEnd]:
        """Ask for a row's next answer; yields the row where that fails."""
        self._run.check()
        try:
            self._under_way[row.next_turn()] = row
        except Exception as error:
            yield row.request, row.results, error


def together(run: Run, requests: Iterable[Request], progress: RunProgress) -> Generator[RowEnd, None, None]:
    """Yield prompts in the order in which they end; as many are under way as the engine has room for.

    `progress` shows how it goes. Raises KeyboardInterrupt where texts were cancelled, behind those that ended before.
    """
    together = RowsTogether(run, functools.partial(next, iter(requests), None), progress=progress)
    try:
        while (yield from together.step()):
            pass
    finally:
        together.close()


@contextmanager
def saying_room(run: Run) -> Iterator[None]:
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
