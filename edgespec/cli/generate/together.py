"""The prompts of a run that are under way together, until each has its answers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from edgespec.cli.console import Console
from edgespec.cli.generate.requests import EncodeTurn, Request, RunSettings
from edgespec.cli.generate.tally import Tally
from edgespec.cli.generate.turns import RowAnswers
from edgespec.cli.open_engine import trees_in_words
from edgespec.cli.prefill_line import PrefillLine
from edgespec.engine import Engine
from edgespec.text.handle import OnPrefill, TextHandle
from edgespec.text.results import GenerationResult

Ended: TypeAlias = tuple[Request, list[GenerationResult], Exception | None]  # a prompt's answers, or what ended it


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


def together(
    run: Run, requests: list[Request], tally: Tally, draw: Callable[[str], None]
) -> Generator[Ended, None, None]:
    """Yield prompts in the order in which they end; as many are under way as the engine has room for.

    `draw` shows how it goes. Raises KeyboardInterrupt where texts were cancelled, behind those that ended before.
    """
    waiting = iter(requests)
    under_way: dict[TextHandle, RowAnswers] = {}
    reading = _Reading(run.console, draw)
    try:
        while True:
            while len(under_way) < run.engine.place.num_texts:
                request = next(waiting, None)
                if request is None:
                    break
                row = RowAnswers(run.engine, request, run.encode, on_prefill=reading.prompt(request))
                yield from _begin(run, row, under_way)
            if not under_way:
                return
            with saying_room(run):
                num_texts = run.engine.advance()
            if all(handle.added or handle.is_done for handle in under_way):
                reading.end()
            tokens = sum(len(handle.added) for handle in under_way)
            draw(tally.progress(num_texts, tokens))
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
                yield from _begin(run, row, under_way)
    finally:
        for handle in under_way:
            handle.cancel()


def _begin(run: Run, row: RowAnswers, under_way: dict[TextHandle, RowAnswers]) -> Iterator[Ended]:
    """Ask for a row's next answer; yields the row where that fails."""
    run.check()
    try:
        under_way[row.next_turn()] = row
    except Exception as error:
        yield row.request, row.results, error


class _Reading:
    """Shows how much of the prompts that are being read is read, of all of them together."""

    def __init__(self, console: Console, draw: Callable[[str], None]) -> None:
        self._line = PrefillLine(console, draw=draw)
        self._counts: dict[str, tuple[int, int]] = {}  # of each row: tokens that are read, of how many

    def prompt(self, request: Request) -> OnPrefill:
        """Return what is told how much of this row's prompt is read."""
        return functools.partial(self._update, request.row.id)

    def end(self) -> None:
        """Remove the line: nothing is being read."""
        self._line.end()
        self._counts.clear()
        self._line.begin()

    def _update(self, row: str, done_tokens: int, num_tokens: int) -> None:
        self._counts[row] = done_tokens, num_tokens
        done, total = zip(*self._counts.values(), strict=True)
        self._line.update(sum(done), sum(total))


@contextmanager
def saying_room(run: Run) -> Iterator[None]:
    """Within this block it is said where memory ran out and trees became smaller."""
    engine, room = run.engine, run.engine.room
    yield
    if engine.room != room:
        now, before = (trees_in_words(tree, is_tuned=engine.is_tuned) for tree in (engine.room, room))
        run.console.say(f"memory ran out in a pass: {now} from here on, no longer {before}")


def say_trees(run: Run, result: GenerationResult) -> None:
    """Say in detail what trees such texts have."""
    trees = run.engine.trees_in_use(result.sampling)
    if trees is not None:
        run.console.detail(trees)
