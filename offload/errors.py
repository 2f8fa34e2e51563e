"""These errors arise between a checkpoint and a device; their sentences are for the user."""

from __future__ import annotations


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
