"""The state of a file, which changes where the file is written to: no content is read."""

import os
import time

COARSEST_CLOCK_NS = 2_000_000_000  # of a file system: FAT counts in two seconds

FileState = tuple[int, ...]


def file_state(found: os.stat_result) -> FileState:
    """Return numbers that change where a file is written to, or where another has taken its place.

    The last number is of no use on Windows; elsewhere it changes though a copy brings the time of its original.
    """
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def is_settled(state: FileState) -> bool:
    """Return whether a write from now on changes the state: the clock that it is of may be coarse."""
    return time.time_ns() - max(state[2:]) > COARSEST_CLOCK_NS
