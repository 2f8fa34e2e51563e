"""--log-file: what is said to the person, with time stamps, and the details that -v would print."""

from __future__ import annotations

import logging
import re
import shlex
import sys
from pathlib import Path

from edgespec import __version__
from edgespec.cli.standard_streams import visible
from edgespec.errors import EdgespecError

LOG = logging.getLogger("edgespec.cli")
LOG.propagate = False
LOG.setLevel(logging.DEBUG)
LOG.addHandler(logging.NullHandler())  # else Python writes errors to stderr where no file is open
LINE = re.compile(rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ ")


class _Lines(logging.Formatter):
    """Dates and levels before messages, which can be shown as they are."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def open_log(path: Path) -> None:
    """Write what is logged from here on to the end of a file; raises EdgespecError, also for another kind of file."""
    try:
        if path.is_file():
            with path.open("rb") as file:
                if (begin := file.read(64)) and not LINE.match(begin):
                    raise EdgespecError(
                        "E_OUTPUT_EXISTS", f"'{path}' exists and is no log.", "Choose another file for --log-file."
                    )
        handler = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise EdgespecError(
            "E_OUTPUT", f"the log '{path}' cannot be written ({error.strerror}).", "Choose a file that can be."
        ) from error
    handler.setFormatter(_Lines("%(asctime)s %(levelname)s %(message)s"))
    LOG.addHandler(handler)
    LOG.info("edgespec %s: edgespec %s", __version__, shlex.join(sys.argv[1:]))


def current_log() -> Path | None:
    """Return the file that is open; None where there is none."""
    names = [handler.baseFilename for handler in LOG.handlers if isinstance(handler, logging.FileHandler)]
    return Path(names[0]) if names else None


def close_log() -> None:
    """Close the file, if one is open."""
    for handler in [handler for handler in LOG.handlers if isinstance(handler, logging.FileHandler)]:
        LOG.removeHandler(handler)
        handler.close()
