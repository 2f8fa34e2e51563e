"""Page-locked host memory of an exact size, and the weights that wait in it.

torch's own pinned allocator rounds every buffer up to a power of two, which at the size of decoder
layers can double the memory that a plan promised. Here anonymous pages are mapped and then
registered with the driver.
"""

import contextlib
import logging
import time
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from offload.device import Device, PinningError
from offload.device_slots import StagingBuffer
from offload.layer_store import LayerRecord, LayerStore, RecordKey
from offload.pages import fresh_pages

logger = logging.getLogger("edgespec.offload")

NUM_TIMED = 3
TIMED_BYTES = 16 << 20  # of a copy: passes take more of a device
LEAST_STAGING = 2  # locked buffers: one is filled while the other is copied


def copy_seconds(locked: Tensor, device: Device) -> tuple[float, float]:
    """Return the seconds of a copy of TIMED_BYTES from locked memory, and of one into it: the fastest of some.

    Less memory is taken for a share of it.
    """
    locked = locked[:TIMED_BYTES]
    there, pageable, stream = device.empty(locked.numel()), torch.zeros_like(locked), device.new_stream()
    link_s, host_s = [], []
    for _ in range(NUM_TIMED):
        started = time.perf_counter()
        device.copy(locked, there, stream)
        stream.synchronize()
        copied = time.perf_counter()
        locked.copy_(pageable)
        link_s.append(copied - started)
        host_s.append(time.perf_counter() - copied)
    share = TIMED_BYTES / locked.numel()
    return share * min(link_s), share * min(host_s)


class PinnedBuffer:
    """Holds page-locked memory: `bytes` is a uint8 tensor that a device copies from at full speed, asynchronously.

    Raises PinningError where the driver or the system's limit on locked memory refuses.
    """

    def __init__(self, num_bytes: int, *, device: Device) -> None:
        # A failed mapping is an OSError: the address space or the commit limit is exhausted.
        try:
            self.bytes: Tensor = fresh_pages(num_bytes)
        except OSError as error:
            raise PinningError(str(error)) from error
        device.lock(self.bytes)
        # Also when construction further up fails: pages must not be unmapped while they are registered.
        self._release = weakref.finalize(self, device.unlock, self.bytes)

    def close(self) -> None:
        """Unlock the pages; nothing may be copying from them any more."""
        self._release()


class PinnedRecords:
    """Weights in pinned memory, and pinned staging buffers for others, as far as the system lets us lock them."""

    def __init__(self, store: LayerStore, device: Device) -> None:
        self._store, self._device = store, device
        self._buffers: list[PinnedBuffer] = []
        self._staging: list[PinnedBuffer] = []
        self.weights: dict[RecordKey, Tensor] = {}  # of each record, as in a slot

    def fill(self, groups: Sequence[Sequence[LayerRecord]], what: str) -> None:
        """Read the records into a buffer for each group; a warning counts `what` could not be locked."""
        for records in groups:
            sizes = [record.flat_bytes for record in records]
            try:
                buffer = PinnedBuffer(sum(sizes), device=self._device)
            except PinningError as error:
                all_records = [record for group in groups for record in group]
                left_bytes = sum(record.flat_bytes for record in all_records if record.key not in self.weights)
                logger.warning(
                    "only %d of %d %s could be kept in locked memory (%s); the others, %.1f GiB, are read from their "
                    "files by way of a small buffer%s",
                    len(self.weights), len(all_records), what, error, left_bytes / (1 << 30), self._cost(left_bytes),
                )  # fmt: skip
                return
            self._buffers.append(buffer)
            for record, place in zip(records, buffer.bytes.split(sizes), strict=True):
                self._store.populate(record)
                self._store.copy(record, place)
                self._store.drop(record)
                self.weights[record.key] = place

    def _cost(self, num_bytes: int) -> str:
        """Return what a pass over weights takes that are not locked, to end a sentence: by copies that are timed."""
        try:
            link_s, host_s = copy_seconds(self._staging[0].bytes, self._device)
        except (IndexError, torch.OutOfMemoryError):  # none is locked, or the device has no room for a copy
            return "; edgespec doctor says what that costs"
        staged_s, locked_s = (seconds * num_bytes / TIMED_BYTES for seconds in (max(link_s, host_s), link_s))
        return f": a pass over all of them takes {staged_s:.2g} s or more, which would be {locked_s:.2g} s if locked"

    def staging_buffers(self, count: int, num_bytes: int) -> list[StagingBuffer]:
        """Return staging buffers: as many as can be locked, at least two, or all of them pageable.

        Pageable ones block the reader while they are copied.
        """
        with contextlib.suppress(PinningError):
            while len(self._staging) < count:
                self._staging.append(PinnedBuffer(num_bytes, device=self._device))
        places = [buffer.bytes for buffer in self._staging]
        if len(places) < min(count, LEAST_STAGING):
            self.close_staging()
            places = [torch.empty(num_bytes, dtype=torch.uint8) for _ in range(count)]
        # The reader sleeps while it waits for one of them, it does not spin.
        return [StagingBuffer(place, self._device.new_event(blocking=True)) for place in places]

    def close_staging(self) -> None:
        """Unlock the staging buffers; nothing may be copying from them any more."""
        for buffer in self._staging:
            buffer.close()
        self._staging = []

    def close(self) -> None:
        """Unlock the memory; nothing may be copying from it any more."""
        self.close_staging()
        for buffer in self._buffers:
            buffer.close()
        self._buffers = []
