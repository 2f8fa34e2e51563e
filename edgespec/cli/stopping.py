"""Ctrl-C while texts are made: the first ends a text after its pass, the second between two layers, a third at once."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from edgespec.engine import Engine

STDERR = 2
NOTICE = b"\nstopping after this pass (Ctrl-C again: within it)\n"


@contextmanager
def stop_between_passes(engine: Engine, *, quiet: bool = False) -> Iterator[Callable[[], None]]:
    """Yields what is to be called between two texts: it raises KeyboardInterrupt once Ctrl-C was pressed.

    The text under way is cancelled, and ends as one that was interrupted.
    """
    num_pressed = 0

    def press(_signal: int, _frame: FrameType | None) -> None:
        nonlocal num_pressed
        num_pressed += 1
        if num_pressed > 2:
            raise KeyboardInterrupt
        engine.cancel(abandon=num_pressed > 1)
        if num_pressed == 1 and not quiet:
            os.write(STDERR, NOTICE)  # not sys.stderr, which may be in the middle of a write

    def check() -> None:
        if num_pressed:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # where no handler can be set
        yield check
        return
    before = signal.signal(signal.SIGINT, press)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)


def command_to_continue() -> str:
    """The command line of this process, with --resume."""
    words = ["edgespec", *(word for word in sys.argv[1:] if word != "--overwrite")]
    words += [] if "--resume" in words else ["--resume"]
    return subprocess.list2cmdline(words) if sys.platform == "win32" else shlex.join(words)
