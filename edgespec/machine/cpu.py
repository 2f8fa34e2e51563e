"""The processor's cores that this process may use: physical ones, within its affinity and its cgroup's quota.

Two threads of one core share its arithmetic units, so more than one thread a core does not pay. This module imports no
torch.
"""

import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from edgespec.config import require
from edgespec.machine.cgroup import cgroup_folders

# Variables by which the user chooses the number of threads; torch reads them when it is imported
CHOSEN_BY = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
# Variables that set how OpenMP's threads wait for work: GNU's, and those of Intel and LLVM
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")
LOOK_S = 0.05  # several turns of the system's scheduler
QUIET = 0.9  # of the time: the system itself takes the rest
TOPOLOGY = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """The processors of a machine, and the share of them that this process has."""

    machine: int  # logical processors
    allowed: tuple[int, ...]  # logical processors of the affinity, by number
    physical: int  # cores that those belong to
    quota: float | None  # processors' worth of time that the cgroup grants; None: all

    @property
    def usable(self) -> int:
        """Return the most threads that pay; above the quota, all threads wait until it is renewed."""
        return max(1, min(self.physical, math.floor(self.quota) if self.quota is not None else self.physical))


def read_cpu(root: Path = Path("/")) -> Cpu:
    """Return the system's facts; `root` is the folder of its files."""
    machine = os.cpu_count() or 1
    allowed = _affinity(machine)
    # From Python 3.13 on: the affinity, or what the user set for Python in its place.
    from_python = getattr(os, "process_cpu_count", os.cpu_count)() or machine
    return Cpu(
        machine=machine, allowed=allowed, physical=min(_physical(allowed, root), from_python), quota=_cpu_quota(root)
    )


def processor_share(root: Path = Path("/")) -> float:
    """Return the share of a core's time that other programs leave: of what this thread ran and waited for a core.

    Linux counts both from the thread's start on. Elsewhere it is looked at for a moment, in which a thread that has
    slept before is favoured.
    """
    try:
        counted = (root / "proc/thread-self/schedstat").read_text(encoding="ascii")
        own, waited, _ = map(int, counted.split())  # nanoseconds
        share = own / (own + waited)
    except (OSError, ValueError, ZeroDivisionError):
        share = _share_for_a_moment()
    return 1.0 if share > QUIET else share


def _share_for_a_moment() -> float:
    started, own = time.perf_counter(), time.thread_time()
    while (passed := time.perf_counter() - started) < LOOK_S:
        pass
    return (time.thread_time() - own) / passed


def threads_in_words(cpu: Cpu, environment: Mapping[str, str]) -> str:
    """Return in words the number of threads that edgespec uses by itself, and why."""
    name = chosen_by(environment)
    if name is not None:
        return f"as {name}={environment[name]} says"
    why = "1 core" if cpu.physical == 1 else f"{cpu.physical} cores"
    if len(cpu.allowed) < cpu.machine:
        why += f", the affinity allows {len(cpu.allowed)} of {cpu.machine} processors"
    if cpu.quota is not None:
        why += f", the cgroup's quota is {cpu.quota:g}"
    return f"{'' if cpu.usable == 1 else 'as many as pay, at most '}{cpu.usable} ({why})"


def check_threads(threads: int | None) -> int | None:
    """Return the option `threads`; raises EdgespecError for a number that the machine does not have."""
    most = os.cpu_count() or 1
    require(
        threads is None or 1 <= threads <= most,
        f"`threads={threads}` is not between 1 and {most}, the processors that this machine has.",
        "Leave it out: as many are used as pay.",
    )
    return threads


def chosen_by(environment: Mapping[str, str]) -> str | None:
    """Return the variable by which the user chose the number of threads; None without any."""
    return next((name for name in CHOSEN_BY if environment.get(name)), None)


def _affinity(machine: int) -> tuple[int, ...]:
    process = psutil.Process()
    if not hasattr(process, "cpu_affinity"):  # macOS has none
        return tuple(range(machine))
    return tuple(sorted(process.cpu_affinity())) or tuple(range(machine))


def _physical(allowed: tuple[int, ...], root: Path) -> int:
    """Count the cores of these processors; without the system's topology, the machine's."""
    files = [root / TOPOLOGY.format(number) for number in allowed]
    try:
        return len({file.read_text(encoding="ascii").strip() for file in files})
    except OSError:
        return min(psutil.cpu_count(logical=False) or len(allowed), len(allowed))


def _cpu_quota(root: Path) -> float | None:
    """Return the least quota of the process's cgroup and of those above it, of either version."""
    found = (_quota_of(version, folder) for version, folder in cgroup_folders("cpu", root))
    return min((quota for quota in found if quota is not None), default=None)


def _quota_of(version: int, folder: Path) -> float | None:
    names = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    try:
        text = " ".join((folder / name).read_text(encoding="ascii") for name in names)
        quota, period = map(int, text.split())  # "max" is no number
        return quota / period if quota >= 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
