"""Unforeseen faults, wrong usage and memory that ran out, as errors for people."""

import os
import traceback
from collections.abc import Sequence

import click

from edgespec.cli.log_file import LOG
from edgespec.cli.spelling import spelled_error
from edgespec.cli.standard_streams import StdoutError
from edgespec.errors import EdgespecError, is_out_of_memory, unexpected

GIB = 1 << 30
TORCH_BYTES = 1 << 30  # of addresses that it takes when it is imported, most of which are never used


def as_edgespec_error(error: Exception) -> EdgespecError:
    """Return the error that tells of any other one, as the command line spells it."""
    if isinstance(error, EdgespecError):
        return spelled_error(error)
    if isinstance(error, click.ClickException):
        context = getattr(error, "ctx", None)
        path = "edgespec" if context is None else context.command_path
        return EdgespecError("E_USAGE", error.format_message(), f"{path} --help")
    if isinstance(error, StdoutError):
        what = f"cannot write results to stdout ({error.strerror})."
        return EdgespecError("E_OUTPUT", what, "Free some space, or send them elsewhere.")
    if type(error).__name__ == "OutOfMemoryError":
        return memory_error("the device's memory ran out.", "Lower --max-gpu-mem, -ngl or --tree-size.")
    if is_out_of_memory(error):
        return memory_error("memory ran out.", "Set --max-cpu-mem below what is free, or lower --tree-size.")
    return unexpected(error)


def memory_error(what: str, fix: str) -> EdgespecError:
    """Return the error of memory that ran out; where the shell limits addresses, that is why."""
    from edgespec.machine.host_memory import address_limit_bytes

    limit_bytes = address_limit_bytes()
    if limit_bytes is not None:
        what = f"{what.rstrip('.')}: 'ulimit -v' allows this process {limit_bytes / GIB:.3g} GiB of addresses."
        fix = f"Remove that limit with 'ulimit -v unlimited', or raise it. {fix}"
    return EdgespecError("E_MEMORY", what, fix)


def require_addresses() -> None:
    """Raise EdgespecError where the shell leaves too few addresses for torch, which would crash or hang."""
    from edgespec.machine.host_memory import free_addresses_bytes

    free_bytes = free_addresses_bytes()
    if free_bytes is not None and free_bytes < TORCH_BYTES:
        raise memory_error(
            f"torch needs {TORCH_BYTES / GIB:.3g} GiB of addresses, and there are {free_bytes / GIB:.3g}.",
            "It is no limit of the memory that is used.",
        )


def is_debugged(arguments: Sequence[str]) -> bool:
    """Return whether a command line or the environment asks for traces."""
    return bool(os.environ.get("EDGESPEC_DEBUG")) or "-vv" in arguments


def show_trace(*, debug: bool) -> None:
    """Write the trace of the error at hand to the log, and to stderr where `debug` asks for it."""
    LOG.debug("trace", exc_info=True)
    if debug:
        traceback.print_exc()
