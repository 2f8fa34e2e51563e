"""Interrupts at chosen places: Ctrl-C raises where Python looks at signals, which is where something is called."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
OURS = tuple(str(ROOT / room) for room in ("edgespec", "offload"))
EVENTS = {"call", "return", "c_return"}
GENERATOR = "<genexpr>"  # one that is let go unfinished is called once more, and Python drops what it raises then


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
        code = frame.f_code
        if event not in EVENTS or code.co_name == GENERATOR or not code.co_filename.startswith(OURS):
            return
        places.count += 1
        if places.count == place:
            sys.setprofile(None)
            places.interrupted = f"{code.co_filename}:{frame.f_lineno} {event}"
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
