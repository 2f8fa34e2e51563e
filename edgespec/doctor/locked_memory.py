"""How much memory can be locked for a device, and what layers cost that find no more of it."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from edgespec.doctor.checks import GIB
from edgespec.model.host_memory import free_host_bytes
from offload.device import Device, PinningError
from offload.pinned import PinnedBuffer

STEP_BYTES = 256 << 20
MOST_BYTES = 4 << 30
LEFT_BYTES = 1 << 30  # of free RAM, which this is not to fill
REPEATS = 3
SHOWN_BYTES = 20 << 30  # of layers, that a pass of a large model copies


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedMemory:
    """What could be locked, and the rates of copies."""

    num_bytes: int
    refusal: str | None = None  # why no more could be locked; None where no more was tried
    link_bytes_per_s: float = 0.0  # from locked memory to the device; 0 where none could be locked
    host_bytes_per_s: float = 0.0  # into locked memory: what layers that are not locked wait for

    @property
    def cost(self) -> str:
        """What a pass over many layers takes where they are locked, and where they are not, to end a sentence."""
        if not self.link_bytes_per_s:
            return ""
        locked_s, staged_s = (
            SHOWN_BYTES / rate for rate in (self.link_bytes_per_s, min(self.link_bytes_per_s, self.host_bytes_per_s))
        )
        return (
            f"; a pass over {SHOWN_BYTES / GIB:.0f} GiB of layers takes {locked_s:.1f} s from locked memory, and "
            f"{staged_s:.1f} s through staging buffers"
        )


def try_locking(device: Device) -> LockedMemory:
    """Lock memory step by step until the system refuses, or enough is locked; let all of it go again."""
    buffers: list[PinnedBuffer] = []
    refusal = None
    try:
        while len(buffers) * STEP_BYTES < MOST_BYTES and free_host_bytes() > LEFT_BYTES + STEP_BYTES:
            try:
                buffers.append(PinnedBuffer(STEP_BYTES, device=device))
            except PinningError as error:
                refusal = str(error)
                break
        if not buffers:
            return LockedMemory(num_bytes=0, refusal=refusal)
        link_s, host_s = _copy_seconds(buffers[0].bytes, device)
        return LockedMemory(
            num_bytes=len(buffers) * STEP_BYTES,
            refusal=refusal,
            link_bytes_per_s=STEP_BYTES / link_s,
            host_bytes_per_s=STEP_BYTES / host_s,
        )
    finally:
        for buffer in buffers:
            buffer.close()


def _copy_seconds(locked: Tensor, device: Device) -> tuple[float, float]:
    """Return the seconds of a copy of locked memory to the device, and of one into it, the fastest of some."""
    there, pageable = device.empty(locked.numel()), torch.zeros_like(locked)
    stream = device.new_stream()
    link_s, host_s = [], []
    for _ in range(REPEATS):
        started = time.perf_counter()
        device.copy(locked, there, stream)
        stream.synchronize()
        copied = time.perf_counter()
        locked.copy_(pageable)
        link_s.append(copied - started)
        host_s.append(time.perf_counter() - copied)
    return min(link_s), min(host_s)
