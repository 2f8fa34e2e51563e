"""These errors arise between a checkpoint and a device; their sentences are for the user."""

from collections.abc import Iterator
from contextlib import contextmanager


class OffloadError(Exception):
    """A fault with a stable `code`, one sentence `what`, and the `fix` to try."""

    def __init__(self, code: str, what: str, fix: str) -> None:
        super().__init__(f"{what} {fix}")
        self.code = code
        self.what = what
        self.fix = fix


class CheckpointError(OffloadError):
    """The folder does not hold a usable checkpoint."""


class PlacementError(OffloadError):
    """The model cannot be placed within its memory; it needs at least `needed_bytes`."""

    def __init__(self, code: str, what: str, fix: str, *, needed_bytes: int) -> None:
        super().__init__(code, what, fix)
        self.needed_bytes = needed_bytes


class StreamError(OffloadError):
    """A layer could not be read while a pass needed it."""


@contextmanager
def read_errors() -> Iterator[None]:
    """Within this block, an error of the system becomes a StreamError."""
    try:
        yield
    except OSError as error:
        what = f"reading weights failed: {error}."
        raise StreamError("E_READ_FAILED", what, "Restore the file; the next prompt reads it again.") from error
