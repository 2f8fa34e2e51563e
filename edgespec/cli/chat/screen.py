"""The two streams of a chat: answers on stdout, everything else on stderr, with colour where it is wanted."""

from __future__ import annotations

import os
import sys
import time

from edgespec.cli.console import Console, visible

DIM, YELLOW, PLAIN = "\x1b[2m", "\x1b[33m", "\x1b[0m"
CLEAR_LINE = "\r\x1b[K"
PROGRESS_AFTER_S = 1.0
PROGRESS_EVERY_S = 0.2
DEFAULT_WIDTH = 80  # where a terminal does not tell
UNLIMITED_WIDTH = 10_000


def wants_color(choice: str) -> bool:
    """Whether --color, NO_COLOR and the terminal say so."""
    if choice != "auto":
        return choice == "always"
    return sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Screen:
    """Where a chat writes."""

    def __init__(self, console: Console, *, color: str) -> None:
        self.console = console
        self.has_color = wants_color(color)
        self._is_terminal = sys.stdout.isatty()
        self._answer_end = "\n"  # of what was written of this answer
        self._progress_width = 0  # of the line that is to be overwritten
        self._started = self._drawn = 0.0

    def say(self, text: str) -> None:
        """Lines for the person; control characters in them are shown."""
        self.end_answer()
        self.console.say(visible(text))

    def note(self, text: str, *, warning: str = "") -> None:
        """A dim line, and behind it what should be noticed."""
        self.end_answer()
        parts = [(DIM, text), (YELLOW, warning)]
        self.console.say(
            " · ".join(f"{color}{visible(part)}{PLAIN}" if self.has_color else visible(part)
                       for color, part in parts if part)
        )  # fmt: skip

    def begin_answer(self) -> None:
        """What is written from now on is an answer."""
        self._started, self._drawn = time.monotonic(), 0.0
        self._answer_end = "\n"

    def answer(self, text: str) -> None:
        """A piece of it; a terminal obeys nothing that a model writes."""
        self._end_progress()
        if text:
            self._answer_end = text[-1]
            sys.stdout.write(visible(text) if self._is_terminal else text)
            sys.stdout.flush()

    def end_answer(self) -> None:
        """Let what follows begin on a line of its own."""
        self._end_progress()
        if self._answer_end != "\n":
            self._answer_end = "\n"
            sys.stdout.write("\n")
            sys.stdout.flush()

    def prefill(self, done_tokens: int, num_tokens: int) -> None:
        """How much of the prompt is read, once that takes a while."""
        now = time.monotonic()
        passed_s = now - self._started
        if passed_s < PROGRESS_AFTER_S or now - self._drawn < PROGRESS_EVERY_S or not done_tokens:
            return
        left_s = passed_s * (num_tokens - done_tokens) / done_tokens
        text = f"prefill {done_tokens}/{num_tokens} tok {100 * done_tokens // num_tokens}% eta {left_s:.0f}s"
        if not self.console.is_terminal:
            self.console.say_sometimes(text)
        elif not self.console.quiet:
            self._drawn = now
            self._write_over(text[: self.width - 1])

    @property
    def width(self) -> int:
        """Columns of the terminal; no limit where there is none."""
        try:
            return os.get_terminal_size(sys.stderr.fileno()).columns or DEFAULT_WIDTH
        except (OSError, ValueError):
            return UNLIMITED_WIDTH

    def _end_progress(self) -> None:
        if self._progress_width:
            self._write_over("")
            self._progress_width = 0

    def _write_over(self, text: str) -> None:
        # Without colour there may be no other sequences either: blanks do as well.
        begin = CLEAR_LINE if self.has_color else "\r" + " " * self._progress_width + "\r"
        sys.stderr.write(begin + text)
        sys.stderr.flush()
        self._progress_width = len(text)
