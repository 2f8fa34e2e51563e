"""A machine's facts, and the rates of its disk and of its copies to a device."""

import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch

from profiles.disk_sync import sync_to_disk
from profiles.schema import MachineFacts

PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "bitsandbytes")
READ_BYTES = 8 << 20  # large enough for any disk's full speed
COPY_BYTES = 256 << 20
COPY_REPEATS = 5
SMI_SECONDS = 10


def machine_facts(device: torch.device | None = None) -> MachineFacts:
    """Return the facts of the machine that computes on this device; without one, on its first card if it has any."""
    device = torch.device("cuda", 0) if device is None else device
    is_there = device.type == "cuda" and torch.cuda.is_available()
    accelerator = torch.cuda.get_device_properties(device) if is_there else None
    driver, link = _driver_and_link(f"GPU-{accelerator.uuid}") if accelerator else (None, None)
    return MachineFacts(
        system=platform.platform(),
        processor=_processor_name(),
        num_cores=os.cpu_count() or 1,
        memory_bytes=psutil.virtual_memory().total,
        accelerator=accelerator.name if accelerator else None,
        accelerator_bytes=accelerator.total_memory if accelerator else None,
        driver=driver,
        link=link,
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
            sync_to_disk(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class SequentialRead:
    """The bytes that one thread read of some files, from start to end."""

    num_bytes: int
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        """The rate of the read."""
        return self.num_bytes / self.seconds


def read_sequentially(
    files: Sequence[Path], *, most_bytes: float = math.inf, most_s: float = math.inf
) -> SequentialRead:
    """Read the files one after the other, until so much is read or so much time is gone; raises OSError."""
    buffer = bytearray(READ_BYTES)
    total, started = 0, time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as file:
            while total < most_bytes and time.perf_counter() - started < most_s and (count := file.readinto(buffer)):
                total += count
    return SequentialRead(num_bytes=total, seconds=time.perf_counter() - started)


def copy_bytes_per_s(device: torch.device, *, pinned: bool) -> float | None:
    """Return the rate of copies from RAM to the device, the median of some.

    It is None where the memory cannot be had.
    """
    try:
        source = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=pinned)
        target = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    except RuntimeError:  # too little memory, or none that can be pinned
        return None
    source.zero_()
    seconds = []
    for _ in range(COPY_REPEATS):
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return COPY_BYTES / statistics.median(seconds)


def _driver_and_link(card: str) -> tuple[str | None, str | None]:
    """Return the driver's version, and the link as "PCIe 4.0 x16", as nvidia-smi tells of the card of this UUID.

    Each is None where it does not tell. A number would be another card's where CUDA_VISIBLE_DEVICES hides some.
    """
    query = "driver_version,pcie.link.gen.max,pcie.link.width.max"
    try:
        answer = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", f"--id={card}"],
            capture_output=True,
            text=True,
            timeout=SMI_SECONDS,
            check=True,
        ).stdout
        driver, generation, width = (part.strip() for part in answer.strip().split(","))
    except (OSError, subprocess.SubprocessError, ValueError):
        return None, None
    return driver, f"PCIe {generation}.0 x{width}"


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
