"""The lock of an engine's texts: one thread holds it at a time, for a step or for something between two steps.

An exception from outside, such as Ctrl-C's, may fall at any place: it is always let go, and those who wait go on.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TypeVar

from edgespec.errors import EdgespecError

MAX_WAIT_S = 1.0  # for another thread's step: an interrupt may keep that thread from saying that it is over
_HOLDER = "holder"
_Found = TypeVar("_Found")


class StepLock:
    """Which thread holds it, and which wait for it."""

    def __init__(self) -> None:
        # The thread that has it, set and taken out in one operation each: an interrupt falls before or after.
        self._holder: dict[str, int] = {}
        self._bells: list[SimpleQueue[None]] = []  # of the threads that wait for its end
        self.abandons = False  # whether the step that is being made is to be left between two layers

    @property
    def is_taken(self) -> bool:
        """Whether a thread has it."""
        return bool(self._holder)

    def check(self) -> None:
        """Raise EdgespecError where this thread has it already, and would wait for itself."""
        if self._holder.get(_HOLDER) == threading.get_ident():
            what = "a text is waited for within a pass, which ends only when this callback does."
            raise EdgespecError("E_ENGINE", what, "Submit the text there, and wait for it afterwards.")

    def take(self, act: Callable[[], object]) -> None:
        """Call a function while this thread holds it; where another does, wait for that one's end instead."""
        self.check()
        thread = threading.get_ident()
        try:
            if self._holder.setdefault(_HOLDER, thread) != thread:
                self._wait()
            else:
                act()
        finally:
            # An interrupt comes before or after a call, and up to `del` there is none: it is always let go.
            if _HOLDER in self._holder and self._holder[_HOLDER] == thread:
                self.abandons = False
                del self._holder[_HOLDER]
                self._ring()

    def between_steps(self, act: Callable[[], _Found]) -> _Found:
        """Return what a function returns that is called once, while no step is made; raises what it raises."""
        found: list[_Found] = []
        while not found:
            self.take(lambda: found.append(act()))
        return found[0]

    def _wait(self) -> None:
        bell: SimpleQueue[None] = SimpleQueue()
        self._bells.append(bell)
        if self._holder:  # else it is over, and no thread may ring any more
            with suppress(Empty):
                bell.get(timeout=MAX_WAIT_S)

    def _ring(self) -> None:
        with suppress(IndexError):
            while True:
                self._bells.pop().put(None)
