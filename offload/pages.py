"""Read-only mappings of files, how to bring their pages in and let them go, and fresh pages.

The one place that talks to the operating system about memory. A mapped range becomes resident
when it is touched; `populate` does that ahead of use without holding the interpreter lock, and
`drop` takes the range out of this process. The kernel may keep it cached, and takes it back when
memory is short, though as soon as pages that are in use; so `drop` can empty that cache of it, too.
On systems without these calls all degrade to plain reads and to nothing.
"""

import contextlib
import ctypes
import errno
import mmap
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from offload.file_state import FileState, file_state

MADV_WILLNEED = 3
MADV_DONTNEED = 4
MADV_HUGEPAGE = 14
MADV_POPULATE_READ = 22  # Linux 5.14 and later
MADV_POPULATE_WRITE = 23
MADV_COLLAPSE = 25  # Linux 6.1 and later
LARGE_PAGE_BYTES = 2 << 20
NUM_ZEROING = 4  # threads
M_MMAP_THRESHOLD = -3  # glibc's
APART_BYTES = 1 << 20  # blocks from this size on are pages of their own, while weights are made
MOST_THRESHOLD_BYTES = 32 << 20  # that glibc comes to by itself, when large blocks are let go

Madvise = Callable[[int, int, int], int]


def _load_madvise() -> Madvise | None:
    """Return libc's madvise through ctypes, which releases the interpreter lock; None where it means another thing."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        function = ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    function.restype = ctypes.c_int
    return function


_madvise = _load_madvise()


@contextlib.contextmanager
def large_blocks_apart() -> Iterator[None]:
    """Within this block, memory for weights is in pages of its own, where the C library is glibc.

    Elsewhere in the heap, blocks that are let go between those that stay are holes, as large as all weights together.
    What comes and goes in a pass is better off in the heap, whose pages are there already.
    """
    set_threshold = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform.startswith("linux") else None
    if set_threshold is None:
        yield
        return
    set_threshold(M_MMAP_THRESHOLD, APART_BYTES)
    try:
        yield
    finally:
        set_threshold(M_MMAP_THRESHOLD, MOST_THRESHOLD_BYTES)


def give_back_heap() -> None:
    """Give the system what is free in the heaps of all threads, where the C library is glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform.startswith("linux") else None
    if trim is not None:
        trim(0)


class MappedFile:
    """One file mapped read-only; `bytes` is a uint8 tensor over the whole of it, copying nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Stays open: its state is that of the mapped file, also when another file has taken the name.
        file = path.open("rb")
        weakref.finalize(self, file.close)
        self._descriptor = file.fileno()
        self.mapping = mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)
        with warnings.catch_warnings():
            # torch warns that the buffer is not writable; nothing here ever writes to a parameter.
            warnings.simplefilter("ignore", UserWarning)
            self.bytes: Tensor = torch.frombuffer(self.mapping, dtype=torch.uint8)

    def state(self) -> FileState:
        """Return what changes when the file is written to."""
        return file_state(os.fstat(self._descriptor))

    def check_length(self, end: int) -> None:
        """Raise OSError when the file has become shorter than `end`: touching its pages would kill the process."""
        size = os.fstat(self._descriptor).st_size
        if size < end:
            raise OSError(f"'{self.path}' has shrunk to {size} bytes while in use; {end} are needed")

    def populate(self, start: int, end: int) -> None:
        """Make the bytes [start, end) resident, reading them from the disk where needed; raises OSError."""
        if not _advise(self.bytes, start, end, MADV_POPULATE_READ):
            error = ctypes.get_errno() if _madvise is not None else errno.ENOSYS
            if error not in {errno.EINVAL, errno.ENOSYS}:  # the call is known, the pages cannot be read
                raise OSError(error, f"{os.strerror(error)}: '{self.path}'")
            self.bytes[start : end : mmap.PAGESIZE].max()  # touches one byte a page

    def use_large_pages(self, start: int, end: int) -> None:
        """Let the bytes [start, end) that are not in memory yet be read as large pages, where the file system can."""
        _advise(self.bytes, start, end, MADV_HUGEPAGE)

    def announce(self, start: int, end: int) -> None:
        """Let the disk start on the bytes [start, end) without waiting for them."""
        _advise(self.bytes, start, end, MADV_WILLNEED)

    def drop(self, start: int, end: int, *, from_cache: bool = False) -> None:
        """Let go of the whole pages inside [start, end); `from_cache`: the system's cache loses them, where it can."""
        inner_start = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        inner_end = end // mmap.PAGESIZE * mmap.PAGESIZE
        if inner_end <= inner_start:
            return
        _advise(self.bytes, inner_start, inner_end, MADV_DONTNEED)
        if from_cache and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, inner_start, inner_end - inner_start, os.POSIX_FADV_DONTNEED)


def in_large_pages(memory: Tensor) -> Tensor:
    """Return memory whose pages are large once they are touched, where the system has such.

    A pass reads all weights, and looks up where a page is for each 4 KB: with large ones it takes a sixth less.
    """
    if memory.device.type == "cpu" and memory.nbytes >= LARGE_PAGE_BYTES:
        _advise(memory, 0, memory.nbytes, MADV_HUGEPAGE)
    return memory


def gather_in_large_pages(address: int, num_bytes: int) -> None:
    """Let memory that is written already, at such an address, lie in large pages, where the system has such.

    For memory that a library has allocated. Pages at its ends, which it shares with others, are gathered as well.
    """
    if _madvise is not None and num_bytes >= APART_BYTES:
        first = address // LARGE_PAGE_BYTES * LARGE_PAGE_BYTES
        end = -(-(address + num_bytes) // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES
        for start in range(first, end, LARGE_PAGE_BYTES):  # what follows a page that cannot be gathered would stay
            _madvise(start, LARGE_PAGE_BYTES, MADV_COLLAPSE)


def fresh_pages(num_bytes: int) -> Tensor:
    """Return uint8 memory in pages of its own, all of them there; raises OSError where the address space ends."""
    if sys.platform.startswith("linux"):
        # Private pages cost 0.6 of the time of shared ones.
        mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapping.madvise(mmap.MADV_DONTFORK)  # a child process would turn pages that a device reads into copies
        with contextlib.suppress(OSError):  # a kernel without large pages
            mapping.madvise(mmap.MADV_HUGEPAGE)  # a driver locks page by page: half a second a GB of small ones
    else:
        mapping = mmap.mmap(-1, num_bytes)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    piece = -(-num_bytes // NUM_ZEROING // mmap.PAGESIZE) * mmap.PAGESIZE
    starts = range(0, num_bytes, piece)
    with ThreadPoolExecutor(NUM_ZEROING) as pool:  # locking alone would fill the pages with zeros one by one
        list(pool.map(lambda start: _advise(memory, start, min(start + piece, num_bytes), MADV_POPULATE_WRITE), starts))
    return memory


def _advise(data: Tensor, start: int, end: int, advice: int) -> bool:
    """Give the kernel advice on a range, widened to whole pages; return False when it did not take the advice."""
    if _madvise is None:
        return False
    address = data.data_ptr()
    first = (address + start) // mmap.PAGESIZE * mmap.PAGESIZE
    return _madvise(first, address + end - first, advice) == 0
