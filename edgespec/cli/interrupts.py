"""Ctrl-C before there is anything to stop: while modules are imported, and while models are loaded."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from edgespec.cli import EXIT_INTERRUPTED

Handler = Callable[[int, FrameType | None], None]


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """Within it Ctrl-C ends the program: nothing is to be tidied up, and an exception in a C++ import is a crash."""

    def press(_signal: int, _frame: FrameType | None) -> None:
        os._exit(EXIT_INTERRUPTED)

    with _handler(press):
        yield


@contextmanager
def leaving_tidily() -> Iterator[None]:
    """Within it Ctrl-C raises KeyboardInterrupt, and the block does so too whatever became of that inside."""
    is_pressed = False

    def press(_signal: int, _frame: FrameType | None) -> None:
        nonlocal is_pressed
        is_pressed = True
        raise KeyboardInterrupt

    with _handler(press):
        try:
            yield
        except Exception as error:
            if is_pressed:  # an import in between took it for a failure of its own
                raise KeyboardInterrupt from error
            raise
    if is_pressed:
        raise KeyboardInterrupt


@contextmanager
def _handler(press: Handler) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # where no handler can be set
        yield
        return
    before = signal.signal(signal.SIGINT, press)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
