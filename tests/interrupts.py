"""Interrupts at chosen places: Ctrl-C raises where Python looks at signals, which is where something is called."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
OURS = tuple(str(ROOT / room) for room in ("edgespec", "offload"))
EVENTS = {"call", "return", "c_return"}


class Places:
    """The places of a block that were come to, and the one where it was interrupted."""

    def __init__(self) -> None:
        self.count = 0
        self.interrupted: str | None = None


@contextmanager
def interrupted_at(place: int | None) -> Iterator[Places]:
    """Raise KeyboardInterrupt at a place within this block, counted in our code on this thread; None only counts.

    The block ends quietly there.
    """
    places = Places()

    def look(frame: FrameType, event: str, _argument: Any) -> None:
        if event not in EVENTS or not frame.f_code.co_filename.startswith(OURS):
            return
        places.count += 1
        if places.count == place:
            sys.setprofile(None)
            places.interrupted = f"{frame.f_code.co_filename}:{frame.f_lineno} {event}"
            raise KeyboardInterrupt

    before = sys.getprofile()
    try:
        sys.setprofile(look)
        yield places
    except KeyboardInterrupt:
        if places.interrupted is None:
            raise
    finally:
        sys.setprofile(before)
