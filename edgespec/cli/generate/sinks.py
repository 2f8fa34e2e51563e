"""Where results are written: stdout, or a file of whole lines, each on the disk before the next prompt starts."""

from __future__ import annotations

import errno
import io
import os
import stat
import sys
from pathlib import Path

from edgespec.cli.standard_streams import result_stream
from edgespec.errors import EdgespecError


class OutputFile:
    """An output file, opened now so that what cannot be written is known before weights are read. Close it."""

    def __init__(self, path: Path, *, overwrite: bool = False) -> None:
        """Open the file; what is to be overwritten stays until `begin` is called. Raises EdgespecError."""
        self.path, self._overwrite = path, overwrite
        self._is_new = not path.exists()
        try:
            # Unbuffered: a write that fails must not be tried again when the file is closed.
            self._file: io.RawIOBase = path.open("ab", buffering=0)
        except OSError as error:
            raise EdgespecError(
                "E_OUTPUT", f"'{path}' cannot be written ({error.strerror}).", "Choose a file that can be."
            ) from error
        self._is_regular = stat.S_ISREG(os.fstat(self._file.fileno()).st_mode)  # pipes and devices cannot be synced
        if self._is_regular and not _lock(self._file.fileno()):
            self._file.close()
            raise EdgespecError("E_OUTPUT", f"another run is writing '{path}'.", "Wait for it, or choose another file.")

    def begin(self) -> None:
        """Drop what is to be overwritten, and see that the file's name survives a crash."""
        if self._overwrite and self._is_regular:
            self._file.truncate(0)
        if self._is_new and hasattr(os, "O_DIRECTORY"):
            folder = os.open(self.path.absolute().parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            except OSError:
                pass  # a file system that cannot
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
                os.fsync(self._file.fileno())
        except BrokenPipeError:
            raise
        except OSError as error:
            if self._is_regular:
                self._file.truncate(start)
            raise EdgespecError(
                "E_OUTPUT",
                f"cannot write results to '{self.path}' ({error.strerror}).",
                "Free some space and go on with --resume; the records before this one are whole.",
            ) from error

    def clear(self) -> None:
        """Drop what was written: closing deletes the file then."""
        self._file.truncate(0)
        self._is_new = True

    def close(self) -> None:
        """Close the file, and delete one that was made and never written to."""
        is_empty = self._is_regular and os.fstat(self._file.fileno()).st_size == 0
        self._file.close()
        if self._is_new and is_empty:
            self.path.unlink(missing_ok=True)


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


class StandardOutput:
    """Writes results to stdout, line by line."""

    def begin(self) -> None:
        """Do nothing: stdout has nothing to prepare."""

    def write(self, text: str) -> None:
        """Write the text at once; raises OSError where that fails."""
        result_stream().write(text)
        sys.stdout.flush()

    def close(self) -> None:
        """Do nothing: stdout belongs to the process."""


Sink = OutputFile | StandardOutput
