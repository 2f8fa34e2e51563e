"""Lines of an answer that break at words, as it comes: what is on the screen stays, but for a word that goes on.

A piece of an answer is written at once. Where a word grows past the last column, its beginning is erased from the
line, and the word stands on the next. Nothing above that line is touched.
"""

import re

from prompt_toolkit.utils import get_cwidth

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
