"""How much memory can be locked for a device, and what layers cost that find no more of it."""

from dataclasses import dataclass

from edgespec.doctor.checks import GIB
from edgespec.machine.host_memory import free_host_bytes
from offload.device import Device, PinningError
from offload.pinned import TIMED_BYTES, PinnedBuffer, copy_seconds

STEP_BYTES = 256 << 20
MOST_BYTES = 4 << 30
LEFT_BYTES = 1 << 30  # of free RAM, which this is not to fill
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
        link_s, host_s = copy_seconds(buffers[0].bytes, device)
        return LockedMemory(
            num_bytes=len(buffers) * STEP_BYTES,
            refusal=refusal,
            link_bytes_per_s=TIMED_BYTES / link_s,
            host_bytes_per_s=TIMED_BYTES / host_s,
        )
    finally:
        for buffer in buffers:
            buffer.close()
