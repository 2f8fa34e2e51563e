"""Layers are read past the page cache (O_DIRECT), where the file system offers it.

A full cache loses the bytes of a pass before the next pass needs them: keeping them costs the kernel several times the
processor's time of reading, and where it finds no large pages most of the disk's rate.
"""

import mmap
import os
import queue
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from offload.layer_parts import LayerPart
from offload.layer_store import LayerRecord
from offload.pages import fresh_pages

READ_BYTES = 4 << 20
NUM_READERS = 4  # threads: a disk is fastest with several reads at once
BLOCK_BYTES = max(4096, mmap.PAGESIZE)  # that addresses, offsets and lengths of such reads are multiples of


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    """One read, and where its bytes belong."""

    path: Path
    offset: int
    num_blocks: int
    num_needed: int  # bytes: the last block may go beyond the file's end
    moves: tuple[tuple[int, int, int], ...]  # place in the chunk, place in the flat buffer, number of bytes


class DirectFiles:
    """Files of a checkpoint, opened for direct reads until `close`; raises OSError where they are not offered."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._files: dict[Path, int] = {}
        self._close_files = weakref.finalize(self, _close, self._files)
        self._memory: queue.SimpleQueue[np.ndarray] = queue.SimpleQueue()
        self._chunks: dict[tuple[int, int], list[_Chunk]] = {}  # by layer and first byte of a part
        for path in sorted(paths):
            self._files[path] = os.open(path, os.O_RDONLY | os.O_DIRECT)
        for _ in range(NUM_READERS):
            self._memory.put(fresh_pages(READ_BYTES).numpy())
        self._read(_Chunk(path=path, offset=0, num_blocks=1, num_needed=1, moves=()), np.empty(0))
        self._pool = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="edgespec-disk")

    def read(self, part: LayerPart, memory: Tensor) -> None:
        """Read part of a layer, whose bytes are computed with as they are stored, into memory; raises OSError."""
        key = part.record.index, part.start
        if key not in self._chunks:
            self._chunks[key] = chunks_of(part)
        place = memory.numpy()
        for read in [self._pool.submit(self._read, chunk, place) for chunk in self._chunks[key]]:
            read.result()

    def close(self) -> None:
        """Close the files, once no part of a layer is being read any more."""
        self._pool.shutdown()
        self._close_files()

    def _read(self, chunk: _Chunk, flat: np.ndarray) -> None:
        memory = self._memory.get()
        try:
            done, whole = 0, memory.data[: chunk.num_blocks * BLOCK_BYTES]
            while done < chunk.num_needed:
                count = os.preadv(self._files[chunk.path], [whole[done:]], chunk.offset + done)
                if count == 0:
                    size = chunk.offset + done
                    raise OSError(f"'{chunk.path}' has shrunk to {size} bytes while in use")
                done += count
            for start, to, count in chunk.moves:
                flat[to : to + count] = memory[start : start + count]
        finally:
            self._memory.put(memory)


def open_direct(records: Sequence[LayerRecord]) -> DirectFiles | None:
    """Return the files of these layers for direct reads; None where the system or a file system has no such reads."""
    paths = {entry.file for record in records for entry in record.entries}
    if not paths or not hasattr(os, "O_DIRECT"):
        return None
    try:
        return DirectFiles(paths)
    except OSError:
        return None


def chunks_of(part: LayerPart) -> list[_Chunk]:
    """Return the reads that bring a part's ranges."""
    found = []
    for path, start, end in part.ranges:
        shares = [(found, share.to) for share in part.shares for found in share.file_ranges if found[0] == path]
        for offset in range(start // BLOCK_BYTES * BLOCK_BYTES, end, READ_BYTES):
            last = min(end, offset + READ_BYTES)
            moves = []
            for (_, begin, stop), to in shares:
                first, done = max(offset, begin), min(last, stop)
                if first < done:
                    moves.append((first - offset, to + first - begin, done - first))
            num_blocks = -(-(last - offset) // BLOCK_BYTES)
            found.append(
                _Chunk(path=path, offset=offset, num_blocks=num_blocks, num_needed=last - offset, moves=tuple(moves))
            )
    return found


def _close(files: dict[Path, int]) -> None:
    while files:
        os.close(files.popitem()[1])
