"""The two streams of a chat: answers on stdout, everything else on stderr, with colour where it may be used."""

import os
import re
import sys

from prompt_toolkit.utils import get_cwidth

from edgespec.cli.console import Console, draws_lines, terminal_width
from edgespec.cli.prefill_line import PrefillLine
from edgespec.cli.standard_streams import drawing_stream, result_stream, visible

TAB_COLUMNS = 8
JOINER, NO_BREAK = "\u200d", "\xa0"
FENCE = re.compile(r" {0,3}(```|~~~)")
# Lines that are left to the terminal: indented code, but no items of lists; tables
LEFT = re.compile(r"(?: {4,}|\t)(?!\s*(?:[-*+]|\d+[.)])\s)|\s*\|")


class WordLines:
    """Where the cursor is, and the word that stands before it."""

    def __init__(self) -> None:
        self._column = 0  # of the cursor
        self._line = ""  # what was written of the line
        self._word = ""  # the last word, which may go on
        self._word_width = self._word_column = 0  # its columns, and the one that it began in
        self._fence = ""  # of the block of code that is open
        self._columns = 0

    def broken(self, piece: str, columns: int) -> str:
        """Return what to write for a piece of an answer, in a terminal of so many columns."""
        if columns != self._columns:  # the terminal has moved its lines: a word is not looked for in them
            self._columns, self._word = columns, ""
        return "".join(map(self._written, piece))

    def _written(self, character: str) -> str:
        if character == "\n":
            self._end_line()
            return character
        follows_joiner = self._line.endswith(JOINER)
        self._line += character
        width = TAB_COLUMNS - self._column % TAB_COLUMNS if character == "\t" else get_cwidth(character)
        if character.isspace() and character != NO_BREAK:
            self._word = ""
            self._go(width)
            return character
        is_wide = width == 2 and not follows_joiner  # it is a word by itself: such writing has no blanks
        if not self._word or is_wide:
            self._word, self._word_width, self._word_column = "", 0, self._column
        written = self._moved() if width and self._column + width >= self._columns else ""
        self._word += character
        self._word_width += width
        self._go(width)
        if is_wide:
            self._word = ""
        return written + character

    def _go(self, width: int) -> None:
        """Take the cursor on, as a terminal does: what does not fit stands in the next line."""
        if self._column + width > self._columns:
            self._column = self._word_column = 0
        self._column += width

    def _moved(self) -> str:
        """Return what takes the word to the next line; nothing where it may not go, or fills a line by itself."""
        start, width = self._word_column, self._word_width
        if (
            start == 0
            or self._column >= self._columns
            or self._fence
            or FENCE.match(self._line)
            or LEFT.match(self._line)
        ):
            return ""
        self._column, self._word_column = width, 0
        return (f"\x1b[{width}D\x1b[K" if width else "") + "\n" + self._word

    def _end_line(self) -> None:
        fence = FENCE.match(self._line)
        if fence and not self._fence:
            self._fence = fence[1]
        elif fence and self._fence == fence[1]:
            self._fence = ""
        self._column, self._line, self._word = 0, "", ""


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
