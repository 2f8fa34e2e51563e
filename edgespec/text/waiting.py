"""The texts that wait for their turn, however many they are: no step looks at all of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgespec.text.handle import TextHandle

MAX_FIRST = 64  # texts that one step chooses from


class WaitingTexts:
    """Texts in the order in which they begin. Any thread may add one, and an interrupt may fall at any place."""

    def __init__(self) -> None:
        self._waiting: deque[TextHandle] = deque()
        self.cancelled: deque[TextHandle] = deque()  # every cancelled text, until `end_cancelled` has seen it

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[TextHandle]:
        return iter(list(self._waiting))  # another thread may add one meanwhile

    def add(self, handle: TextHandle) -> None:
        """Let a text wait after the others."""
        self._waiting.append(handle)

    def add_first(self, handle: TextHandle) -> None:
        """Let a text wait before the others."""
        self._waiting.appendleft(handle)

    def remove(self, handle: TextHandle) -> None:
        """Take a text out, if it is here."""
        with suppress(ValueError):
            self._waiting.remove(handle)

    def first(self) -> list[TextHandle]:
        """Return the texts that may begin next."""
        return list(islice(self._waiting, MAX_FIRST))

    def end_cancelled(self) -> None:
        """End the texts that were cancelled while they waited."""
        while self.cancelled:
            handle = self.cancelled[0]
            if handle.state == "waiting":
                handle.end()
            if handle.is_done:
                self.remove(handle)
            self.cancelled.popleft()  # last: an interrupt before it only repeats what is done

    def end_all(self, error: Exception) -> None:
        """End all texts with this error."""
        while self._waiting:
            self._waiting[0].end(error)
            self._waiting.popleft()
