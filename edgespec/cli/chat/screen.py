"""The two streams of a chat: answers on stdout, everything else on stderr, with colour where it may be used."""

import os
import sys

from edgespec.cli.chat.lines import WordLines
from edgespec.cli.console import Console, draws_lines, terminal_width
from edgespec.cli.prefill_line import PrefillLine
from edgespec.cli.standard_streams import drawing_stream, result_stream, visible

DIM, YELLOW = "\x1b[2m", "\x1b[33m"


def wants_color(choice: str) -> bool:
    """Return whether to write in colour: --color, NO_COLOR and the terminal decide."""
    if choice != "auto":
        return choice == "always"
    return sys.stderr.isatty() and not os.environ.get("NO_COLOR") and draws_lines()


class Screen:
    """Where a chat writes."""

    def __init__(self, console: Console, *, color: str) -> None:
        self.console = console
        self.has_color = wants_color(color)
        self._answer_end = "\n"  # of what was written of this answer
        self._lines = WordLines()
        self._prefill = PrefillLine(console)

    def say(self, *texts: str) -> None:
        """Write lines for the person."""
        self.end_answer()
        for text in texts:
            self.console.say(text)

    def note(self, text: str, *, warning: str = "") -> None:
        """Write a dim line, and after it a warning that stands out."""
        self.end_answer()
        parts = [(color, part) for color, part in ((DIM, text), (YELLOW, warning)) if part]
        if self.has_color:
            self.console.say_in_color(parts)
        else:
            self.console.say(" · ".join(part for _, part in parts))

    def begin_answer(self) -> None:
        """Begin an answer: `answer` writes its pieces."""
        self._prefill.begin()
        self._answer_end, self._lines = "\n", WordLines()

    def answer(self, text: str) -> None:
        """Write a piece of the answer; on a terminal its lines break at words."""
        self._prefill.end()
        if not text:
            return
        self._answer_end = text[-1]
        if sys.stdout.isatty() and draws_lines():
            drawing_stream(sys.stdout).write(self._lines.broken(visible(text), terminal_width(sys.stdout)))
        else:
            result_stream().write(text)
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
