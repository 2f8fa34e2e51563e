"""What goes to stderr: plan, progress, summary, errors. stdout carries results alone."""

from __future__ import annotations

import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

OnProgress = Callable[[int, int, str], None]  # done, of how many, both in words

QUIET_INTERVAL_S = 10.0  # between progress lines where there is no terminal
DEFAULT_WIDTH = 80  # where a terminal does not tell
UNLIMITED_WIDTH = 10_000


def print_error(what: str, fix: str) -> None:
    """Write the two lines of an error to stderr."""
    sys.stderr.write(f"Error: {what.rstrip()}\nTry: {fix}\n")
    sys.stderr.flush()


def visible(text: str) -> str:
    """Return the text with control characters written out, so that a terminal does not obey them.

    Newlines and tabs stay.
    """
    return "".join(
        character if character.isprintable() or character in "\n\t" else ascii(character)[1:-1] for character in text
    )


class Console:
    """Messages for people, on stderr; `quiet` drops all but errors."""

    def __init__(self, *, quiet: bool, verbose: bool) -> None:
        self.quiet = quiet
        self.verbose = verbose
        self.is_terminal = sys.stderr.isatty()
        self._said_at = time.monotonic()

    @property
    def width(self) -> int:
        """Return the columns of the terminal as it is now; without a terminal there is no limit."""
        try:
            return os.get_terminal_size(sys.stderr.fileno()).columns or DEFAULT_WIDTH
        except (OSError, ValueError):
            return UNLIMITED_WIDTH

    def say(self, text: str) -> None:
        """Write one line, unless quiet."""
        if not self.quiet:
            sys.stderr.write(text + "\n")
            sys.stderr.flush()

    def tell(self, text: str) -> None:
        """Write sentences, broken between words where a terminal's line ends; what is to be copied goes to `say`."""
        self.say(
            textwrap.fill(text, self.width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        )

    def detail(self, text: str) -> None:
        """Write one line where -v asks for details."""
        if self.verbose:
            self.say(text)

    def say_sometimes(self, text: str) -> None:
        """Write a progress line where no bar can be drawn, at most one every ten seconds."""
        now = time.monotonic()
        if not self.is_terminal and now - self._said_at >= QUIET_INTERVAL_S:
            self._said_at = now
            self.say(text)

    def task(self, bar: Progress | None, what: str) -> OnProgress:
        """Begin a task; return its progress function, which moves the bar, or without one writes a line at times."""
        task = bar.add_task(what, total=None, note="") if bar is not None else None

        def update(done: int, total: int, note: str) -> None:
            self.say_sometimes(f"{what}: {note}")
            if bar is not None and task is not None:
                bar.update(task, completed=done, total=total, note=note)

        return update

    def counting(self, bar: Progress | None, what: str, unit: str) -> Callable[[int, int], None]:
        """Begin a task whose progress is a count: 3 of 8 texts."""
        show = self.task(bar, what)
        return lambda done, total: show(done, total, f"{done} of {total} {unit}")

    @contextmanager
    def progress_bar(self, *, wanted: bool = True) -> Iterator[Progress | None]:
        """Draw a bar that vanishes when done; yield None where it is not wanted or there is no terminal."""
        if self.quiet or not self.is_terminal or not wanted:
            yield None
            return
        from rich.console import Console as RichConsole
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = [TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}")]
        with Progress(
            *columns,
            TimeRemainingColumn(),
            console=RichConsole(stderr=True),
            transient=True,
            redirect_stdout=sys.stdout.isatty(),  # else results on their way to a file would be drawn on the terminal
        ) as progress:
            yield progress
