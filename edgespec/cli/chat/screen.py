"""The two streams of a chat: answers on stdout, everything else on stderr, with colour where it is wanted."""

from __future__ import annotations

import os
import sys

from edgespec.cli.console import Console, visible
from edgespec.cli.prefill_line import PrefillLine

DIM, YELLOW, PLAIN = "\x1b[2m", "\x1b[33m", "\x1b[0m"


def wants_color(choice: str) -> bool:
    """Return whether to write in colour: --color, NO_COLOR and the terminal decide."""
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
        self._prefill = PrefillLine(console, may_use_sequences=self.has_color)

    def say(self, text: str) -> None:
        """Write lines for the person; control characters in them are shown, not obeyed."""
        self.end_answer()
        self.console.say(visible(text))

    def note(self, text: str, *, warning: str = "") -> None:
        """Write a dim line, and behind it a warning that stands out."""
        self.end_answer()
        parts = [(DIM, text), (YELLOW, warning)]
        self.console.say(
            " · ".join(f"{color}{visible(part)}{PLAIN}" if self.has_color else visible(part)
                       for color, part in parts if part)
        )  # fmt: skip

    def begin_answer(self) -> None:
        """Begin an answer: `answer` writes its pieces."""
        self._prefill.begin()
        self._answer_end = "\n"

    def answer(self, text: str) -> None:
        """Write a piece of the answer; control characters that a model writes are shown on a terminal, not obeyed."""
        self._prefill.end()
        if text:
            self._answer_end = text[-1]
            sys.stdout.write(visible(text) if self._is_terminal else text)
            sys.stdout.flush()

    def end_answer(self) -> None:
        """End the answer: what follows begins on a line of its own."""
        self._prefill.end()
        if self._answer_end != "\n":
            self._answer_end = "\n"
            sys.stdout.write("\n")
            sys.stdout.flush()

    def prefill(self, done_tokens: int, num_tokens: int) -> None:
        """Show how much of the prompt is read, once that takes a while."""
        self._prefill.update(done_tokens, num_tokens)
