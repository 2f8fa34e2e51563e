"""The prompts of a run that are under way together, until each has its answers."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from edgespec.cli.console import Console, counted
from edgespec.cli.generate.progress import RunProgress
from edgespec.cli.generate.requests import EncodeTurn, Request, RunSettings
from edgespec.cli.generate.turns import RowAnswers
from edgespec.cli.open_engine import trees_in_words
from edgespec.engine import Engine
from edgespec.text.handle import TextHandle
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


def together(run: Run, requests: list[Request], progress: RunProgress) -> Generator[Ended, None, None]:
    """Yield prompts in the order in which they end; as many are under way as the engine has room for.

    `progress` shows how it goes. Raises KeyboardInterrupt where texts were cancelled, behind those that ended before.
    """
    waiting = iter(requests)
    under_way: dict[TextHandle, RowAnswers] = {}
    try:
        while True:
            while len(under_way) < run.engine.place.num_texts:
                request = next(waiting, None)
                if request is None:
                    break
                row = RowAnswers(run.engine, request, run.encode, on_prefill=progress.reads(request))
                yield from _begin(run, row, under_way)
            if not under_way:
                return
            with saying_room(run):
                num_texts = run.engine.advance()
            if not run.num_pressed():  # else what the key was answered with would be drawn over
                progress.show(num_texts, list(under_way.values()))
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


@contextmanager
def saying_room(run: Run) -> Iterator[None]:
    """Within this block it is said where memory ran out, and trees became smaller or texts fewer."""
    engine, room, num_texts = run.engine, run.engine.room, run.engine.num_texts
    yield
    if engine.num_texts < num_texts:
        is_first = num_texts == engine.place.num_texts
        say = run.console.say if is_first else run.console.detail  # each step further down is no news
        now = counted(engine.num_texts, "text")
        say(f"memory ran out in a pass: at most {now} under way from here on, no longer {num_texts}")
    if engine.room != room:
        now, before = (trees_in_words(tree, is_tuned=engine.is_tuned) for tree in (engine.room, room))
        run.console.say(f"memory ran out in a pass: {now} from here on, no longer {before}")


def say_trees(run: Run, result: GenerationResult) -> None:
    """Say in detail what trees such texts have."""
    trees = run.engine.trees_in_use(result.sampling)
    if trees is not None:
        run.console.detail(trees)
