"""How much of a long prompt is read: a line that is written over, and gone when the answer comes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from edgespec.cli.console import Console
from edgespec.cli.standard_streams import drawing_stream

CLEAR_LINE = "\r\x1b[K"
AFTER_S = 1.0  # what takes less is no news
EVERY_S = 0.2


class PrefillLine:
    """Shows how much of a prompt is read: one line that a terminal overwrites, elsewhere a new line now and then.

    Where a terminal has a place for it already, `draw` is called with the text, and at the end with an empty one.
    """

    def __init__(
        self,
        console: Console,
        *,
        may_use_sequences: bool = False,
        label: str = "",
        draw: Callable[[str], None] | None = None,
    ) -> None:
        self._console, self._may_use_sequences, self._label = console, may_use_sequences, label
        self._draw = draw or self._write_over
        self._width = 0  # of the text that is there now
        self.begin()

    def begin(self) -> None:
        """Start the clock: reading begins now."""
        self._started, self._drawn = time.monotonic(), 0.0

    def update(self, done_tokens: int, num_tokens: int) -> None:
        """Show that `done_tokens` of `num_tokens` are read."""
        now = time.monotonic()
        passed_s = now - self._started
        if passed_s < AFTER_S or now - self._drawn < EVERY_S or not done_tokens:
            return
        left_s = passed_s * (num_tokens - done_tokens) / done_tokens
        text = f"prefill {done_tokens}/{num_tokens} tok {100 * done_tokens // num_tokens}% eta {left_s:.0f}s"
        if not self._console.is_terminal:
            self._console.say_sometimes(self._label + text)
        elif not self._console.quiet:
            self._drawn = now
            self._show(text[: self._console.width - 1])

    def end(self) -> None:
        """Remove the line."""
        if self._width:
            self._show("")

    def _show(self, text: str) -> None:
        self._draw(text)
        self._width = len(text)

    def _write_over(self, text: str) -> None:
        # Where sequences are not wanted, blanks do as well.
        begin = CLEAR_LINE if self._may_use_sequences else "\r" + " " * self._width + "\r"
        drawing_stream(sys.stderr).write(begin + text)
        sys.stderr.flush()
