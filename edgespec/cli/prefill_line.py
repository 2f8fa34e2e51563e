"""The share of a long prompt that is read: a line that is drawn over, and gone when the answer comes."""

import time
from collections.abc import Callable

from edgespec.cli.console import Console

AFTER_S = 1.0  # a shorter wait needs no line
EVERY_S = 0.2


class PrefillLine:
    """Shows how much of a prompt is read: one line that a terminal overwrites, elsewhere a new line now and then.

    `draw` is called with the text, and at the end with an empty one; without it the console's status line has the text.
    """

    def __init__(self, console: Console, *, label: str = "", draw: Callable[[str], None] | None = None) -> None:
        self._console, self._label, self._draw = console, label, draw or console.show_status
        self._is_drawn = False
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
            self._drawn, self._is_drawn = now, True
            self._draw(text[: self._console.width - 1])

    def end(self) -> None:
        """Remove the line."""
        if self._is_drawn:
            self._is_drawn = False
            self._draw("")
