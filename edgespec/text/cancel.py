"""The one text that an engine may be decoding, and how somebody asks for its end.

Asking sets a flag and nothing else, so a signal handler, a callback or another thread may do it. The flags are
looked at between passes and between layers, where leaving harms nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from edgespec.errors import EdgespecError


class PassAbandonedError(Exception):
    """Raised to leave a pass between two layers, as somebody asked."""


class Running:
    """Knows whether a text is being decoded, and whether it is to end: after this pass or within it."""

    def __init__(self) -> None:
        self._held = threading.Lock()
        self._stops = self._abandons = False

    @property
    def is_stopping(self) -> bool:
        """Return whether no further pass shall begin."""
        return self._stops

    def cancel(self, *, abandon: bool) -> None:
        """End the text under way after its pass, or with `abandon` within it; without a text, do nothing."""
        self._stops = True
        self._abandons = self._abandons or abandon

    def check_pass(self) -> None:
        """Raise PassAbandonedError where the pass itself is to end."""
        if self._abandons:
            raise PassAbandonedError

    @contextmanager
    def text(self) -> Iterator[None]:
        """Within this block a text is decoded; raises EdgespecError where one is already."""
        if not self._held.acquire(blocking=False):
            raise EdgespecError(
                "E_BUSY", "the engine is decoding another text.", "Finish that one, or close its iterator."
            )
        try:
            self._stops = self._abandons = False
            yield
        finally:
            self._held.release()
