"""Reading a machine's facts and timing its disk."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch

from profiles.schema import MachineFacts

PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "bitsandbytes")
READ_BYTES = 8 << 20  # large enough for any disk's full speed


def machine_facts() -> MachineFacts:
    """Facts of the machine that runs this."""
    accelerator = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    return MachineFacts(
        system=platform.platform(),
        processor=_processor_name(),
        num_cores=os.cpu_count() or 1,
        memory_bytes=psutil.virtual_memory().total,
        accelerator=accelerator.name if accelerator else None,
        accelerator_bytes=accelerator.total_memory if accelerator else None,
        python=platform.python_version(),
        versions={name: found for name in PACKAGES if (found := _version(name)) is not None},
    )


def drop_page_cache(files: Sequence[Path]) -> bool:
    """Make the next read of the files come from the disk; False where the system has no call for it.

    Pages that a process has mapped and touched stay.
    """
    if not hasattr(os, "posix_fadvise"):
        return False
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True


def sequential_read_bytes_per_s(files: Sequence[Path]) -> float:
    """Read the files from start to end, as fast as one thread can, and return the rate."""
    buffer = bytearray(READ_BYTES)
    total = 0
    started = time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                total += count
    return total / (time.perf_counter() - started)


def _processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
