"""The file that results are written to: whole lines, each on the disk before the next prompt starts."""

import contextlib
import errno
import io
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

from edgespec.errors import EdgespecError
from edgespec.user_paths import written_whole
from profiles.disk_sync import sync_to_disk

MAX_TRIES = 10  # to open a file that others replace


class OutputFile:
    """An output file, which no other run can open from now on. Close it.

    A file that cannot be written is found before weights are read, and what was read of it does not change.
    """

    def __init__(self, path: Path, *, overwrite: bool = False, has_ids: bool = True) -> None:
        """Open the file; what is to be overwritten stays until `begin` is called. Raises EdgespecError."""
        self.path, self.overwrite, self._has_ids = path, overwrite, has_ids
        self._lock = _lock_beside(path) if sys.platform == "win32" else None
        self._file = self._open()
        self._is_regular = stat.S_ISREG(os.fstat(self._file.fileno()).st_mode)  # pipes and devices cannot be synced

    @property
    def can_resume(self) -> bool:
        """Return whether a later run can read what the file has, and continue it."""
        return self._is_regular and self._has_ids

    def rewrite(self, data: bytes) -> None:
        """Replace the content in one move, so that there is always a whole one. Raises OSError or EdgespecError."""
        with replaced_file(self.path) as file:
            file.write(data)
            if sys.platform == "win32":  # where no file that is open can be replaced
                self._file.close()
        before, self._file = self._file, self._open()
        before.close()  # not earlier: another run that had the old file open could write into it
        if os.fstat(self._file.fileno()).st_size != len(data):
            raise _taken(self.path)

    def cut(self, num_bytes: int, *, end: bytes = b"") -> None:
        """Keep only the first bytes, and write an end after them; raises OSError."""
        self._file.truncate(num_bytes)
        self._file.write(end)
        sync_to_disk(self._file.fileno())

    def begin(self) -> None:
        """Drop what is to be overwritten, and see that the file's name survives a crash."""
        if self.overwrite and self._is_regular:
            self._file.truncate(0)
        if self._is_new and hasattr(os, "O_DIRECTORY"):
            folder = os.open(self.path.absolute().parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                sync_to_disk(folder)
            except OSError:
                pass  # its name may be lost in a crash: that ends no run
            finally:
                os.close(folder)

    def write(self, text: str) -> None:
        """Write all of the text to the disk; where that fails, keep nothing and raise EdgespecError."""
        # A path may hold half surrogates: escaped, as JSON has them.
        data = memoryview(text.encode(errors="backslashreplace"))
        start = self._file.seek(0, os.SEEK_END) if self._is_regular else 0
        try:
            while data:
                data = data[self._file.write(data) or 0 :]
            if self._is_regular:
                sync_to_disk(self._file.fileno())
        except BrokenPipeError:
            raise
        except OSError as error:
            fix = "Send results elsewhere."
            if self._is_regular:
                self._file.truncate(start)
                how = "go on with --resume" if self._has_ids else "begin anew with --overwrite"
                fix = f"Free some space and {how}; the records before this one are whole."
            raise EdgespecError(
                "E_OUTPUT", f"cannot write results to '{self.path}' ({error.strerror}).", fix
            ) from error

    def clear(self) -> None:
        """Drop what was written: closing deletes the file then."""
        self._file.truncate(0)
        self._is_new = True

    def close(self) -> None:
        """Close the file, and delete one that was made and never written to."""
        if self._file.closed:
            return
        goes = self._is_new and self._is_regular and os.fstat(self._file.fileno()).st_size == 0
        if sys.platform == "win32":  # where no file that is open can be deleted
            self._file.close()
        if goes:  # while it is locked: no other run has begun to write into it
            with contextlib.suppress(OSError):
                self.path.unlink()
        self._file.close()
        if self._lock is not None:
            self._lock.release()

    def _open(self) -> io.RawIOBase:
        """Open the file that has the name, and lock it; raises EdgespecError where that cannot be."""
        for _ in range(MAX_TRIES):
            self._is_new = not self.path.exists()
            try:
                # Unbuffered: a write that fails must not be tried again when the file is closed.
                file: io.RawIOBase = self.path.open("ab", buffering=0)
            except OSError as error:
                raise EdgespecError(
                    "E_OUTPUT", f"'{self.path}' cannot be written ({error.strerror}).", "Choose a file that can be."
                ) from error
            opened = os.fstat(file.fileno())
            if not stat.S_ISREG(opened.st_mode):
                return file
            if not _lock(file.fileno()):
                file.close()
                raise _taken(self.path)
            with contextlib.suppress(OSError):
                if os.path.samestat(opened, self.path.stat()):
                    return file
            file.close()  # the run that held it until now has replaced or removed it
        raise _taken(self.path)


@contextlib.contextmanager
def replaced_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that replaces that of the path, or the one that it links to, when all of it is on the disk."""
    with written_whole(path.resolve(), is_private=False) as partial, partial.open("wb") as file:
        yield file
        file.flush()
        sync_to_disk(file.fileno())


def _lock(descriptor: int) -> bool:
    """Lock the file for this process; return False where another run writes it. Systems without locks count as free."""
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in {errno.EWOULDBLOCK, errno.EACCES}
    return True


def _lock_beside(path: Path) -> FileLock | None:
    """Lock another file in the place of this one, which goes with the lock; None where none can be made.

    For Windows, where a locked file cannot be read. Raises EdgespecError where another run writes the file.
    """
    lock = FileLock(f"{path.resolve()}.lock")
    try:
        lock.acquire(blocking=False)
    except Timeout as error:
        raise _taken(path) from error
    except (OSError, NotImplementedError):
        return None
    return lock


def _taken(path: Path) -> EdgespecError:
    return EdgespecError("E_OUTPUT", f"another run is writing '{path}'.", "Wait for it, or choose another file.")
