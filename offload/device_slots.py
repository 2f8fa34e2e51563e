"""Slots of a device's memory, which one stream fills while others compute.

A copy waits for the slot's last reader and compute waits for the copy, both by events, so that nothing ever
synchronises the device.
"""

from dataclasses import dataclass

from torch import Tensor

from offload.device import Device, DeviceEvent

# A copy that was begun is not interrupted: small ones of other streams wait for as many bytes, a millisecond or two.
CHUNK_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class StagingBuffer:
    """Host memory that a reader fills before it is copied."""

    bytes: Tensor
    copied: DeviceEvent


class DeviceSlots:
    """Holds the slots. `fill` may run on any thread; the others run where the slot is computed with."""

    def __init__(self, device: Device, *, num_slots: int, slot_bytes: int) -> None:
        self._device = device
        # One allocation: an allocator rounds each up, which for a thousand experts is a tenth of the plan.
        self._slots: tuple[Tensor, ...] = device.empty(num_slots * slot_bytes).split(slot_bytes)
        self.copy_stream = device.new_stream()
        self.copy_stream.wait_stream(device.current_stream())  # the slots' memory may still be read
        self._copied = [device.new_event() for _ in range(num_slots)]
        self._released = [device.new_event() for _ in range(num_slots)]
        self._last: int | None = None  # slot that was filled

    def fill(self, slot: int, host: Tensor, staging: StagingBuffer | None = None, *, at: int = 0) -> None:
        """Issue the copy of `host` into the slot, from byte `at` on, after the slot's last reader.

        `host` may lie in `staging`.
        """
        self.copy_stream.wait_event(self._released[slot])
        destination = self._slots[slot][at : at + host.numel()]
        for source, part in zip(host.split(CHUNK_BYTES), destination.split(CHUNK_BYTES), strict=True):
            self._device.copy(source, part, self.copy_stream)
        self._copied[slot].record(self.copy_stream)
        self._last = slot
        if staging is not None:
            staging.copied.record(self.copy_stream)

    @property
    def count(self) -> int:
        """The number of slots."""
        return len(self._slots)

    @property
    def is_idle(self) -> bool:
        """Whether the last copy that was issued has ended."""
        return self._last is None or self._copied[self._last].query()

    def acquire(self, slot: int) -> Tensor:
        """Return the slot's bytes; compute issued from now on waits for the copy."""
        self._device.current_stream().wait_event(self._copied[slot])
        return self._slots[slot]

    def release(self, slot: int) -> None:
        """Let the next copy into the slot wait for the compute issued so far."""
        self._released[slot].record(self._device.current_stream())

    def close(self) -> None:
        """Wait for the copies under way: the memory that they read is about to be another's."""
        self.copy_stream.synchronize()
