"""The program's stdout and stderr: what they show is never obeyed by a terminal.

Results that cannot be written end a run with one error, messages never do.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO, cast

from edgespec.user_paths import CONTROL

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


UNLIMITED_WIDTH = 10_000  # columns of what is no terminal


class StdoutError(OSError):
    """Results could not be written to stdout. It has a class of its own, so that no other failure is taken for it."""


class _ResultStream(io.FileIO):
    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:  # the reader has gone, and needs no error
            raise
        except OSError as error:
            raise StdoutError(error.errno, error.strerror) from error


class _Messages(io.FileIO):
    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def open_streams() -> None:
    """Put streams of ours in the place of sys.stdout and sys.stderr."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # closed: the next file that is opened would take its number, and what is written to it
            os.open(os.devnull, os.O_RDONLY)
    sys.stdin = sys.stdin or open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 (as long as the program)
    sys.stdout = _opened(sys.stdout, _ResultStream, 1)
    sys.stderr = _opened(sys.stderr, _Messages, 2)


def visible(text: str) -> str:
    """Return the text with control characters written out, so that a terminal does not obey them."""
    return CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


class _VisibleStream:
    """A stream in which everything is visible: all else is as in the stream below."""

    def __init__(self, below: TextIO) -> None:
        self.below = below

    def write(self, text: str) -> int:
        self.below.write(visible(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.below, name)


@contextmanager
def visible_streams() -> Iterator[None]:
    """Within this block all text that goes to stdout and stderr is made visible."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (
        stream if isinstance(stream, _VisibleStream) else cast("TextIO", _VisibleStream(stream)) for stream in before
    )
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def drawing_stream(stream: TextIO) -> TextIO:
    """Return the stream below, for sequences of our own: a caller makes texts of others visible first."""
    return stream.below if isinstance(stream, _VisibleStream) else stream


def result_stream() -> TextIO:
    """Return where results go: they are visible on a terminal, and elsewhere, being data, as they are."""
    return sys.stdout if sys.stdout.isatty() else drawing_stream(sys.stdout)


def forget_rest() -> None:
    """Write what stdout still holds; where that fails drop it, or the interpreter would try again at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _opened(stream: TextIO | None, kind: type[io.FileIO], descriptor: int) -> TextIO:
    raw = None if stream is None else getattr(stream.buffer, "raw", stream.buffer)
    if isinstance(stream, io.TextIOWrapper) and not isinstance(raw, io.FileIO):
        stream.reconfigure(encoding="utf-8", errors="replace")  # a Windows console's own encoding lacks most characters
        return stream
    file = kind(descriptor, "wb", closefd=False)
    lines = descriptor == 2 or file.isatty()
    return io.TextIOWrapper(io.BufferedWriter(file), encoding="utf-8", errors="replace", line_buffering=lines)
