"""The one error that reaches a user, with its cause and a way out."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from offload.errors import OffloadError
from profiles.errors import ProfileError

EXIT_RUNTIME = 1
EXIT_USAGE = 2
EXIT_SOME_FAILED = 3
EXIT_NOT_FOUND = 4
EXIT_MEMORY = 5

_NOT_FOUND_CODES = {
    "E_MODEL_NOT_FOUND",
    "E_NO_SAFETENSORS",
    "E_SHARD_MISSING",
    "E_FILE_NOT_FOUND",
    "E_CONFIG_MISSING",
    "E_PROFILE_NOT_FOUND",
}
_RUNTIME_CODES = {
    "E_READ_FAILED",
    "E_FILE_CHANGED",
    "E_CACHE",
    "E_NAN_LOGITS",
    "E_OUTPUT",
    "E_DOWNLOAD",
    "E_TRAIN_NAN",
    "E_WORKER",
    "E_UNEXPECTED",
}


# What torch, CUDA and its libraries, the C++ library, the system and its loader of libraries say. Kernels that load
# with their first call, graphs, and libraries' workspaces have no OutOfMemoryError of torch's own.
_OUT_OF_MEMORY = (
    "DefaultCPUAllocator",
    "out of memory",
    "_ALLOC_FAILED",
    "std::bad_alloc",
    "Cannot allocate memory",
    "failed to map segment",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out: RAM, or a device's.

    torch is not imported for its error's name alone.
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return getattr(error, "errno", None) == errno.ENOMEM or any(words in str(error) for words in _OUT_OF_MEMORY)


class EdgespecError(Exception):
    """A fault with a stable `code` (docs/troubleshooting.md), a sentence `what`, and a `fix` to try.

    Both name settings in backticks as Python has them, `size=9`; the command line puts its flags there.
    """

    def __init__(self, code: str, what: str, fix: str) -> None:
        super().__init__(f"{what} {fix}")
        self.code = code
        self.what = what
        self.fix = fix

    def __reduce__(self) -> tuple[type[EdgespecError], tuple[str, str, str]]:
        return type(self), (self.code, self.what, self.fix)

    @property
    def exit_code(self) -> int:
        """The process's exit status when this error ends it."""
        if self.code == "E_MEMORY":
            return EXIT_MEMORY
        if self.code in _NOT_FOUND_CODES:
            return EXIT_NOT_FOUND
        return EXIT_RUNTIME if self.code in _RUNTIME_CODES else EXIT_USAGE


def unexpected(error: Exception) -> EdgespecError:
    """Return the error for a fault that has no code of its own."""
    what = f"unexpected {type(error).__name__}: {error}"
    return EdgespecError("E_UNEXPECTED", what, "Set EDGESPEC_DEBUG=1 for the trace, and report it.")


@contextmanager
def _as_ours(kind: type[OffloadError | ProfileError]) -> Iterator[None]:
    try:
        yield
    except kind as error:
        raise EdgespecError(error.code, error.what, error.fix) from error


def offload_errors() -> AbstractContextManager[None]:
    """Within this block the offload room's errors become ours."""
    return _as_ours(OffloadError)


def profile_errors() -> AbstractContextManager[None]:
    """Within this block the errors of the profiles room become ours."""
    return _as_ours(ProfileError)
