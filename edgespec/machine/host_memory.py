"""The host memory and the addresses that are free for this process, within its control groups.

Pages of files count as free: the system drops them when a process needs their place.
"""

import sys
from pathlib import Path

import psutil

from edgespec.machine.cgroup import cgroup_folders

ROOM_BYTES = 4 << 30  # at least, for the system and others, where memory is locked: it comes back only at the end
ROOM_SHARE = 0.08  # of the RAM
LIMIT = {1: "memory.limit_in_bytes", 2: "memory.max"}
USAGE = {1: "memory.usage_in_bytes", 2: "memory.current"}
FILE_PAGES = {1: ("total_active_file", "total_inactive_file"), 2: ("active_file", "inactive_file")}


def free_host_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that this process may allocate; `root` is the folder of the system's files."""
    found = (_free_bytes(version, folder) for version, folder in cgroup_folders("memory", root))
    available = int(psutil.virtual_memory().available)
    return min([available, *(free for free in found if free is not None)])


def room_for_system_bytes(usable_bytes: int) -> int:
    """Return how much of the bytes that may be used is not to be locked: what is not used counts as room, too."""
    memory = psutil.virtual_memory()
    room_bytes = max(ROOM_BYTES, int(ROOM_SHARE * memory.total))
    return max(0, room_bytes - (int(memory.available) - usable_bytes))


def address_limit_bytes() -> int | None:
    """Return this process's limit of addresses in bytes (`ulimit -v`); None without a limit."""
    if sys.platform == "win32":
        return None
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def free_addresses_bytes() -> int | None:
    """Return the bytes of addresses that this process has left; None without a limit."""
    limit = address_limit_bytes()
    return None if limit is None else max(0, limit - int(psutil.Process().memory_info().vms))


def _free_bytes(version: int, folder: Path) -> int | None:
    """Return the bytes that a control group leaves free; None for one without a limit."""
    try:
        limit = int((folder / LIMIT[version]).read_text(encoding="ascii"))  # "max" is no number
        usage = int((folder / USAGE[version]).read_text(encoding="ascii"))
        lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
        pages = {name: int(value) for name, value in (line.split() for line in lines)}
    except (OSError, ValueError):
        return None
    return max(0, limit - usage + sum(pages.get(name, 0) for name in FILE_PAGES[version]))
