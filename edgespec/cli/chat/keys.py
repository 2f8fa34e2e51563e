"""Keys that are pressed while a chat loads or answers: they wait for the next line, and are not written into texts."""

import contextlib
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from edgespec.cli.console import draws_lines


class WaitingKeys:
    """What was typed before keys were silent, and how to leave the terminal as it was."""

    def __init__(self) -> None:
        self._before = _attributes()
        self.typed = b""  # with Enter as a terminal gives it to line editors

    def silence(self) -> None:
        """Write nothing of what is typed from here on; Ctrl-C stays a signal."""
        changed = _attributes()
        if changed is None:
            return
        import termios

        has_lines = changed[3] & termios.ICANON
        changed[0] &= ~termios.ICRNL  # Enter stays Enter: the line editor takes a newline for Ctrl-J
        changed[3] &= ~(termios.ECHO | termios.ICANON)
        _set(changed)
        if has_lines:  # where Linux' terminals keep a waiting Ctrl-D as a zero byte
            self.typed += _waiting().replace(b"\n", b"\r").replace(b"\0", b"\x04")

    def restore(self) -> None:
        """Put the terminal back to what it was."""
        if self._before is not None:
            _set(self._before)


@contextmanager
def silent_keys() -> Iterator[WaitingKeys]:
    """Within this block what is typed waits for the next line; a terminal that cannot draw lines keeps its own ones."""
    keys = WaitingKeys()
    keys.silence()
    try:
        yield keys
    finally:
        keys.restore()


def _waiting() -> bytes:
    """Return what was typed and not read yet."""
    found = b""
    descriptor = sys.stdin.fileno()
    with contextlib.suppress(OSError):
        while select.select([descriptor], [], [], 0)[0] and (part := os.read(descriptor, 4096)):
            found += part
    return found


def _attributes() -> list[Any] | None:
    """Return the terminal's settings; None where it has none, or where its own lines are read."""
    if sys.platform == "win32" or not sys.stdin.isatty() or not draws_lines():
        return None
    import termios

    try:
        return termios.tcgetattr(sys.stdin.fileno())
    except (termios.error, ValueError):
        return None


def _set(attributes: list[Any]) -> None:
    if sys.platform != "win32":
        import termios

        with contextlib.suppress(termios.error, ValueError):  # it may be gone
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, attributes)
