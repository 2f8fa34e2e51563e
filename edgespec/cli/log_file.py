"""--log-file: all messages with time stamps, and the details that -v would print."""

import logging
import re
import shlex
import sys
from pathlib import Path

from edgespec import __version__
from edgespec.cli.standard_streams import visible
from edgespec.errors import EdgespecError
from edgespec.user_paths import PRIVATE_FILE

LOG = logging.getLogger("edgespec.cli")
LOG.propagate = False
LOG.setLevel(logging.DEBUG)
LOG.addHandler(logging.NullHandler())  # else Python writes errors to stderr where no file is open
LINE = re.compile(rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ ")


def open_log(path: Path) -> None:
    """Write what is logged from here on to the end of a file; raises EdgespecError, also for another kind of file."""
    try:
        if path.is_file():
            with path.open("rb") as file:
                if (begin := file.read(64)) and not LINE.match(begin):
                    raise EdgespecError(
                        "E_OUTPUT_EXISTS", f"'{path}' exists and is no log.", "Choose another file for --log-file."
                    )
        handler = _LogFile(path)
    except OSError as error:
        raise EdgespecError(
            "E_OUTPUT", f"the log '{path}' cannot be written ({error.strerror}).", "Choose a file that can be."
        ) from error
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    LOG.addHandler(handler)
    LOG.info("edgespec %s: edgespec %s", __version__, shlex.join(sys.argv[1:]))


def current_log() -> Path | None:
    """Return the file that is open; None where there is none."""
    return next((handler.path for handler in LOG.handlers if isinstance(handler, _LogFile)), None)


def close_log() -> None:
    """Close the file, if one is open."""
    for handler in [handler for handler in LOG.handlers if isinstance(handler, _LogFile)]:
        LOG.removeHandler(handler)
        handler.close()


class _LogFile(logging.Handler):
    """Writes lines to the end of a file, which is the user's alone where it is new.

    A line that cannot be written ends nothing; it is said once.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self._has_failed = path, False
        path.touch(PRIVATE_FILE)
        self._file = path.open("ab", buffering=0)  # or what could not be written would be tried again at the end

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line."""
        try:
            self._file.write(f"{visible(self.format(record))}\n".encode(errors="backslashreplace"))
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                sys.stderr.write(f"the log '{self.path}' lacks lines: it cannot be written ({error.strerror})\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()
