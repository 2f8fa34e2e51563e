"""The host's memory that is free for this process: the machine's, within its control groups, and addresses for it.

Pages of files are counted as free: the system lets go of them when somebody needs their place.
"""

from __future__ import annotations

import sys
from pathlib import Path

import psutil

from edgespec.model.cgroup import cgroup_folders

LIMIT = {1: "memory.limit_in_bytes", 2: "memory.max"}
USAGE = {1: "memory.usage_in_bytes", 2: "memory.current"}
FILE_PAGES = {
    1: ("total_active_file", "total_inactive_file"),
    2: ("active_file", "inactive_file"),
}


def free_host_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that this process may take; `root` is where the system's files lie."""
    found = (_free_bytes(version, folder) for version, folder in cgroup_folders("memory", root))
    available = int(psutil.virtual_memory().available)
    return min([available, *(free for free in found if free is not None)])


def address_limit_bytes() -> int | None:
    """Return how many bytes of addresses this process may have (`ulimit -v`); None where there is no limit."""
    if sys.platform == "win32":
        return None
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def free_addresses_bytes() -> int | None:
    """Return how many bytes of addresses are left to this process; None where there is no limit."""
    limit = address_limit_bytes()
    return None if limit is None else max(0, limit - int(psutil.Process().memory_info().vms))


def _free_bytes(version: int, folder: Path) -> int | None:
    """Return what a control group leaves free; None for one that does not say."""
    try:
        limit = int((folder / LIMIT[version]).read_text(encoding="ascii"))  # "max" is no number
        usage = int((folder / USAGE[version]).read_text(encoding="ascii"))
        lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
        pages = {name: int(value) for name, value in (line.split() for line in lines)}
    except (OSError, ValueError):
        return None
    return max(0, limit - usage + sum(pages.get(name, 0) for name in FILE_PAGES[version]))
