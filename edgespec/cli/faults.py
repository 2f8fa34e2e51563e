"""Faults that nobody foresaw, and memory that ran out, as errors for people."""

from __future__ import annotations

import os
import sys
import traceback

from edgespec.cli.log_file import LOG
from edgespec.errors import EdgespecError, is_out_of_memory

GIB = 1 << 30
TORCH_BYTES = 1 << 30  # of addresses that it takes when it is imported, most of which are never used


def as_edgespec_error(error: Exception) -> EdgespecError:
    """Return the error that tells of any other one."""
    if isinstance(error, EdgespecError):
        return error
    if type(error).__name__ == "OutOfMemoryError":
        return memory_error("the device's memory ran out.", "Lower --max-gpu-mem, -ngl or --tree-size.")
    if is_out_of_memory(error):
        return memory_error("memory ran out.", "Set --max-cpu-mem below what is free, or lower --tree-size.")
    what = f"unexpected {type(error).__name__}: {error}"
    return EdgespecError("E_UNEXPECTED", what, "Set EDGESPEC_DEBUG=1 for the trace, and report it.")


def memory_error(what: str, fix: str) -> EdgespecError:
    """Return the error of memory that ran out; where the shell limits addresses, that is why."""
    from edgespec.model.host_memory import address_limit_bytes

    limit_bytes = address_limit_bytes()
    if limit_bytes is not None:
        what = f"{what.rstrip('.')}: 'ulimit -v' allows this process {limit_bytes / GIB:.3g} GiB of addresses."
        fix = f"Remove that limit with 'ulimit -v unlimited', or raise it. {fix}"
    return EdgespecError("E_MEMORY", what, fix)


def require_addresses() -> None:
    """Raise EdgespecError where the shell leaves no room for torch, which would crash or hang."""
    from edgespec.model.host_memory import free_addresses_bytes

    free_bytes = free_addresses_bytes()
    if free_bytes is not None and free_bytes < TORCH_BYTES:
        raise memory_error(
            f"torch needs {TORCH_BYTES / GIB:.3g} GiB of addresses, and there are {free_bytes / GIB:.3g}.",
            "It is no limit of the memory that is used.",
        )


def is_debugged() -> bool:
    """Return whether traces are wanted."""
    return bool(os.environ.get("EDGESPEC_DEBUG")) or "-vv" in sys.argv[1:]


def show_trace(*, debug: bool) -> None:
    """Write the trace of the error at hand to the log, and where it is wanted to stderr."""
    LOG.debug("trace", exc_info=True)
    if debug:
        traceback.print_exc()
