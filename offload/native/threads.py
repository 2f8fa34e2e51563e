"""Functions run on the threads that torch has already: a second set of busy ones would stand in their way."""

from __future__ import annotations

import ctypes
import functools
import sys
from pathlib import Path
from typing import Any

import torch


def are_known() -> bool:
    """Return whether torch's threads can be asked to run a function."""
    return _openmp() is not None


@functools.cache
def _openmp() -> Any:
    """Return the OpenMP library that torch has loaded; None where it is another one than GNU's, or none."""
    if not sys.platform.startswith("linux"):
        return None
    with Path("/proc/self/maps").open() as maps:
        paths = {line.split()[-1] for line in maps if "libgomp" in line}
    return ctypes.CDLL(max(paths, key=lambda path: "torch" in path)) if paths else None


def most_threads() -> int:
    """Return how many threads a function can run on now: torch's own, where they can be asked."""
    return torch.get_num_threads() if _openmp() is not None else 1


def address_of(name: str) -> int | None:
    """Return where a function of the OpenMP library is; None without one."""
    library = _openmp()
    return None if library is None else ctypes.cast(getattr(library, name), ctypes.c_void_p).value


def run(function_address: int, argument_address: int, num_threads: int) -> None:
    """Call a function, which takes one pointer, on so many threads at once, and wait for all."""
    library = _openmp()
    if library is None or num_threads == 1:
        _alone(function_address)(argument_address)
    else:
        _parallel(library)(function_address, argument_address, num_threads, 0)


@functools.cache
def _alone(function_address: int) -> Any:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function_address)


@functools.cache
def _parallel(library: Any) -> Any:
    library.GOMP_parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    library.GOMP_parallel.restype = None
    return library.GOMP_parallel
