"""What goes to stderr: plan, progress, summary, errors. stdout carries results alone."""

from __future__ import annotations

import os
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from edgespec.cli.log_file import LOG
from edgespec.cli.standard_streams import UNLIMITED_WIDTH, drawing_stream, visible, visible_streams

if TYPE_CHECKING:
    from rich.progress import Progress

OnProgress = Callable[[int, int, str], None]  # done, of how many, both in words
DrawLines = Callable[[Sequence[str]], None]

QUIET_INTERVAL_S = 10.0  # between progress lines where there is no terminal
MAX_NAMED = 5  # prompts or settings in one message
DEFAULT_WIDTH = 80  # of a terminal that does not report its own
DUMB = ("", "dumb", "unknown")  # values of TERM
COLOR = re.compile(r"\x1b\[[0-9;]*m")
PLAIN = "\x1b[0m"


def print_error(what: str, fix: str) -> None:
    """Write the two lines of an error to stderr."""
    LOG.error("%s %s", what.rstrip(), fix)
    sys.stderr.write(broken(f"Error: {what.rstrip()}\nTry: {fix}\n", terminal_width(sys.stderr)))
    sys.stderr.flush()


def terminal_width(stream: TextIO) -> int:
    """Return the columns of the terminal that a stream goes to, as it is now; elsewhere there is no limit."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or DEFAULT_WIDTH
    except (OSError, ValueError):
        return UNLIMITED_WIDTH


def draws_lines() -> bool:
    """Return whether a terminal of this kind knows how to draw over a line, by TERM; on Windows all do."""
    return sys.platform == "win32" or os.environ.get("TERM", "").lower() not in DUMB


def broken(text: str, width: int, *, indent: str = "  ") -> str:
    """Return text whose lines are broken between words where they are too long; what goes on is indented."""
    return "\n".join(
        line if len(COLOR.sub("", line)) <= width else
        textwrap.fill(line, width, subsequent_indent=line[: len(line) - len(line.lstrip())] + indent,
                      break_long_words=False, break_on_hyphens=False)
        for line in text.split("\n")
    )  # fmt: skip


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: 1 pass, 2 passes, 1,024 tokens."""
    ending = "" if count == 1 else "es" if noun.endswith("s") else "s"
    return f"{count:,} {noun}{ending}"


def named(names: Sequence[str], *, most: int = MAX_NAMED) -> str:
    """Return the first names in one line, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def write_lines(text: str, *, indent: str = "  ") -> None:
    """Write lines for people to stdout, broken between words where they are longer than a terminal's."""
    sys.stdout.write(broken(text, terminal_width(sys.stdout), indent=indent) + "\n")


class Console:
    """Messages for people, on stderr; `quiet` drops all but errors."""

    def __init__(self, *, quiet: bool, verbose: bool) -> None:
        self.quiet = quiet
        self.verbose = verbose
        self.is_terminal = sys.stderr.isatty() and draws_lines()  # where lines are drawn over
        self._said_at = time.monotonic()
        self._status = ""  # the line that stands at the bottom of the terminal

    @property
    def _draws(self) -> bool:
        return self.is_terminal and not self.quiet

    @property
    def width(self) -> int:
        """Return the columns of the terminal as it is now; without a terminal there is no limit."""
        return terminal_width(sys.stderr)

    def say(self, text: str, *, breaks: bool = True) -> None:
        """Write lines, unless quiet, broken between words where a terminal's line ends; the log has them as they are.

        What is to be copied from the terminal does not break.
        """
        LOG.info(text)
        self._write(broken(text, self.width) if breaks else text)

    def say_in_color(self, parts: Sequence[tuple[str, str]]) -> None:
        """Write one line of parts, each after the sequence of its colour."""
        LOG.info(" · ".join(text for _, text in parts))
        line = " · ".join(f"{color}{visible(text)}{PLAIN}" for color, text in parts)
        self._write(broken(line, self.width), is_drawn=True)

    def detail(self, text: str) -> None:
        """Write one line with -v, and always to the log."""
        if self.verbose:
            self.say(text)
        else:
            LOG.info(text)

    def say_sometimes(self, text: str) -> None:
        """Write a progress line where no bar can be drawn, at most one every ten seconds."""
        now = time.monotonic()
        if not self.is_terminal and now - self._said_at >= QUIET_INTERVAL_S:
            self._said_at = now
            self._write(text)

    @contextmanager
    def status(self, text: str) -> Iterator[None]:
        """Show a line on a terminal until the block ends; messages meanwhile go above it."""
        self.show_status(text)
        try:
            yield
        finally:
            self.show_status("")

    def show_status(self, text: str) -> None:
        """Show a line at the bottom of a terminal, in place of the last one; an empty text removes it."""
        if not self._draws:
            return
        self._erase_status()
        self._status = visible(text)[: self.width - 1]
        self._draw_status()

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
    def progress_bar(self, *, is_shown: bool = True) -> Iterator[Progress | None]:
        """Draw a bar that vanishes when done; yield None where it is not to be shown or there is no terminal."""
        if not self._draws or not is_shown:
            yield None
            return
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.table import Column

        from edgespec.cli.rich_console import VisibleConsole

        def text(content: str) -> TextColumn:  # in a narrow terminal it is cut: a line more would scroll
            return TextColumn(content, markup=False, table_column=Column(no_wrap=True, overflow="ellipsis"))

        progress = Progress(
            text("{task.description}"),
            BarColumn(),
            text("{task.fields[note]}"),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
            console=VisibleConsole(file=drawing_stream(sys.stderr)),
            transient=True,
            redirect_stdout=sys.stdout.isatty(),  # else results on their way to a file would be drawn on the terminal
        )
        with progress, visible_streams():
            yield progress

    @contextmanager
    def live_lines(self, *, is_shown: bool = True) -> Iterator[DrawLines]:
        """Yield a function that draws lines over those that it drew before; they vanish when the block ends.

        It does nothing where they are not to be shown or there is no terminal.
        """
        if not self._draws or not is_shown:
            yield lambda _lines: None
            return
        from rich.live import Live
        from rich.text import Text

        from edgespec.cli.rich_console import VisibleConsole

        live = Live(
            Text(),  # so that there is a line from the first moment on
            # Results that go through it stay whole lines.
            console=VisibleConsole(file=drawing_stream(sys.stderr), soft_wrap=True),
            transient=True,
            auto_refresh=False,
            redirect_stdout=sys.stdout.isatty(),  # else results on their way to a file would be drawn on the terminal
        )
        with live, visible_streams():
            yield lambda lines: live.update(Text("\n".join(lines), no_wrap=True, overflow="ellipsis"), refresh=True)

    def _write(self, text: str, *, is_drawn: bool = False) -> None:
        if self.quiet:
            return
        self._erase_status()
        (drawing_stream(sys.stderr) if is_drawn else sys.stderr).write(text + "\n")
        self._draw_status()
        sys.stderr.flush()

    def _draw_status(self) -> None:
        sys.stderr.write(self._status)
        sys.stderr.flush()

    def _erase_status(self) -> None:
        if self._status:
            drawing_stream(sys.stderr).write("\r" + " " * len(self._status) + "\r")
            sys.stderr.flush()
