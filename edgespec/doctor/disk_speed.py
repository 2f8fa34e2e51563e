"""The speed of a disk, read from start to end, within bounds of time and bytes.

A model's own files are read where they are; without them, a temporary file is written, and read back once the
system has been told to forget it.
"""

import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from profiles.disk_sync import sync_to_disk
from profiles.measure import drop_page_cache, read_sequentially

CHUNK_BYTES = 8 << 20
MAX_BYTES = 1 << 30  # that are read
MAX_WRITTEN_BYTES = 128 << 20
MAX_S = 1.0  # of writing, and of reading


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSpeed:
    """The rate at which a disk was read, and how much was read."""

    bytes_per_s: float
    num_bytes: int  # that were read
    is_cold: bool  # False: the system may have had the file in memory


def read_speed(files: Sequence[Path]) -> DiskSpeed:
    """Measure the speed of reading files that are there; raises OSError."""
    is_cold = drop_page_cache(files)
    read = read_sequentially(files, most_bytes=MAX_BYTES, most_s=MAX_S)
    return DiskSpeed(bytes_per_s=read.bytes_per_s, num_bytes=read.num_bytes, is_cold=is_cold)


def scratch_speed(folder: Path) -> DiskSpeed:
    """Measure it with a temporary file in a folder; raises OSError where the file cannot be written."""
    # Not all zeros: some disks and filesystems do not store those.
    block = os.urandom(CHUNK_BYTES)
    with tempfile.TemporaryDirectory(prefix="edgespec-", dir=folder) as scratch:
        path = Path(scratch) / "scratch"
        with path.open("wb", buffering=0) as file:
            started = time.perf_counter()
            for _ in range(MAX_WRITTEN_BYTES // CHUNK_BYTES):
                file.write(block)
                sync_to_disk(file.fileno())
                if time.perf_counter() - started > MAX_S:
                    break
        return read_speed([path])
