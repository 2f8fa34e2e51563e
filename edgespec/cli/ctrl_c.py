"""Ctrl-C: while modules are imported, while models are loaded, and while texts are made."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING

from edgespec.cli.faults import require_addresses

if TYPE_CHECKING:
    from edgespec.cli.console import Console
    from edgespec.engine import Engine

EXIT_INTERRUPTED = 130
HANG_UP: int | None = getattr(signal, "SIGHUP", None)  # Windows has none
TERMINATIONS = (signal.SIGTERM,) if HANG_UP is None else (signal.SIGTERM, HANG_UP)
SAID = "said"  # the note of an exception whose reason and consequences were said where it passed
STDERR = 2
STOPPING = "stopping after this pass (Ctrl-C again: within it)"
IMPORTING = "loading torch and transformers"  # said meanwhile: it takes seconds
Handler = Callable[[int, FrameType | None], None]


class Terminated(BaseException):
    """SIGTERM and SIGHUP raise this, with their number, so that they unwind like an interrupt and files are closed."""


def import_engine(console: Console, *, tidy: Callable[[], None] | None = None) -> None:
    """Import torch, transformers and the engine; Ctrl-C calls `tidy` and ends the program."""
    with importing(console, tidy=tidy):
        import edgespec.engine  # noqa: F401


@contextmanager
def importing(console: Console, *, tidy: Callable[[], None] | None = None) -> Iterator[None]:
    """Within this block torch and transformers are imported, which takes seconds: say so, and let Ctrl-C end it."""
    require_addresses()
    with console.status(IMPORTING), leaving_at_once(tidy):
        yield


@contextmanager
def without_collections() -> Iterator[None]:
    """Within this block the interpreter looks for no cycles among what it imports, and later not there.

    It would look through half a million objects again and again, for a second of a program's start.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def leaving_at_once(tidy: Callable[[], None] | None = None) -> Iterator[None]:
    """Within this block, which imports, Ctrl-C ends the program at once, after a call of `tidy`.

    Nothing else is to be tidied up yet, and an exception in a C++ import is a crash.
    """

    def press(_signal: int, _frame: FrameType | None) -> None:
        _notice(b"\nstopped: interrupted\n")
        if tidy is not None:
            tidy()
        os._exit(EXIT_INTERRUPTED)

    with _handler(press), without_collections():
        yield


@contextmanager
def leaving_tidily() -> Iterator[None]:
    """Within this block Ctrl-C raises KeyboardInterrupt; the block raises it at its end if it was swallowed inside."""
    with staying_interrupts() as is_pressed:
        yield
        if is_pressed():
            raise KeyboardInterrupt


@contextmanager
def staying_interrupts() -> Iterator[Callable[[], bool]]:
    """Within this block Ctrl-C raises KeyboardInterrupt, and so does the block where others made an error of that.

    Yields a function that returns whether Ctrl-C was pressed.
    """
    is_pressed = False

    def press(_signal: int, _frame: FrameType | None) -> None:
        nonlocal is_pressed
        is_pressed = True
        raise KeyboardInterrupt

    with _handler(press):
        try:
            yield lambda: is_pressed
        except Exception as error:
            if is_pressed:  # an import in between took it for a failure of its own
                raise KeyboardInterrupt from error
            raise


@contextmanager
def raising_at_the_prompt() -> Iterator[None]:
    """Within this block Ctrl-C is a key: it raises KeyboardInterrupt, and nothing remembers it."""
    with _handler(signal.default_int_handler):
        yield


@contextmanager
def cancelling(engine: Engine, *, notices: Sequence[bytes], give_up: Callable[[], None]) -> Iterator[Callable[[], int]]:
    """Within this block Ctrl-C ends the text under way: after its pass, then within it; the third calls `give_up`.

    Each of the first presses writes one of `notices`. Yields a function that returns how often Ctrl-C was pressed.
    """

    def cancel(num_pressed: int) -> None:
        engine.cancel(abandon=num_pressed > 1)

    with counting_presses(notices=notices, give_up=give_up, on_press=cancel) as num_pressed:
        yield num_pressed


@contextmanager
def counting_presses(
    *, notices: Sequence[bytes], give_up: Callable[[], None], on_press: Callable[[int], None] = lambda _number: None
) -> Iterator[Callable[[], int]]:
    """Within this block Ctrl-C is counted; the first two presses go to `on_press`, the third calls `give_up`.

    Each of the first presses writes one of `notices`. Yields a function that returns how often Ctrl-C was pressed.
    """
    num_pressed = 0

    def press(_signal: int, _frame: FrameType | None) -> None:
        nonlocal num_pressed
        num_pressed += 1
        if num_pressed > 2:
            give_up()
            return
        if num_pressed <= len(notices):
            _notice(notices[num_pressed - 1])
        on_press(num_pressed)

    with _handler(press):
        yield lambda: num_pressed


def raise_interrupt() -> None:
    """Raise KeyboardInterrupt, as Ctrl-C does without a handler."""
    raise KeyboardInterrupt


def stopping_notice(words: str = STOPPING, *, line_width: int | None) -> bytes:
    """Return what the first Ctrl-C is answered with: lines of its own, or one in place of the last that is drawn over.

    A newline there would leave the drawn lines on the screen, because their number is counted.
    """
    if line_width is None:
        return f"\n{words}\n".encode()
    return f"\r\x1b[K{words[: line_width - 1]}".encode()


@contextmanager
def keeping_termination() -> Iterator[None]:
    """Keep the way in which SIGTERM and SIGHUP end the program: some libraries put their own in its place."""
    before = [signal.getsignal(number) for number in TERMINATIONS]
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in zip(TERMINATIONS, before, strict=True):
                signal.signal(number, handler)


@contextmanager
def ending_by(stop: Callable[[int], None]) -> Iterator[None]:
    """Within this block SIGTERM and SIGHUP call `stop` with how many came, and the block raises Terminated at its end.

    An event loop keeps for itself what is raised within its tasks.
    """
    came: list[int] = []

    def end(number: int, _frame: FrameType | None) -> None:
        came.append(number)
        stop(len(came))

    with keeping_termination():
        for number in TERMINATIONS:
            if callable(signal.getsignal(number)):  # not where it is ignored, or ends the program by itself
                signal.signal(number, end)
        yield
    if came:
        raise Terminated(came[0])


def _notice(line: bytes) -> None:
    with suppress(OSError):  # not sys.stderr, which may be in the middle of a write
        os.write(STDERR, line)


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
