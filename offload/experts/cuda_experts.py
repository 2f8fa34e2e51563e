"""Experts on a CUDA device: slots of one expert each, filled from pinned memory or from the files.

An expert in pinned memory whose few rows the host computes sooner than it moves stays there, and comes afterwards.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.device import Device, PinningError
from offload.device_slots import DeviceSlots, StagingBuffer
from offload.experts.cpu_experts import NUM_READERS
from offload.experts.expert_group import ExpertGroup, ExpertWeights
from offload.experts.expert_source import Wait
from offload.experts.expert_use import ExpertUse, most_used
from offload.experts.host_speed import host_speed
from offload.layer_store import LayerRecord, LayerStore, RecordKey
from offload.pinned import PinnedBuffer
from profiles.in_place import HostRates

logger = logging.getLogger("edgespec.offload")

COPIES_TIMED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRoom:
    """How many experts have a place, and the numbers of scratch memory."""

    num_slots: int  # on the device
    num_pinned: int  # in locked memory
    num_scratch: int


class CudaExperts:
    """Experts in slots of a device.

    The `room.num_pinned` experts of all layers that are used most wait in pinned memory, as far as the system lets
    them be locked; the others pass through staging buffers. `rates` decide which experts are computed where they lie;
    None measures them.
    """

    def __init__(
        self,
        store: LayerStore,
        groups: Sequence[ExpertGroup],
        *,
        room: ExpertRoom,
        use: ExpertUse | None = None,
        dtype: torch.dtype,
        device: Device,
        rates: HostRates | None = None,
    ) -> None:
        num_slots, num_pinned, num_scratch = room.num_slots, room.num_pinned, room.num_scratch
        slot_bytes = max(group.expert_flat_bytes for group in groups)
        self._store, self._device, self.device = store, device, device.torch_device
        self._host_scratch = torch.empty(num_scratch, dtype=dtype)
        self._slots = DeviceSlots(device, num_slots=num_slots, slot_bytes=slot_bytes)
        self._scratch = device.empty(num_scratch * dtype.itemsize).view(dtype)
        self._free = list(range(num_slots))
        self._slot_of: dict[RecordKey, int] = {}
        self._pinned_buffers: list[PinnedBuffer] = []
        self._staging: queue.SimpleQueue[StagingBuffer] = queue.SimpleQueue()
        self._readers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="edgespec-experts")
        records = [record for group in groups for record in group.experts]
        if num_pinned < len(records):  # the staging buffers first: where little can be locked, they are what matters
            self._make_staging(slot_bytes)
        self._pinned: dict[RecordKey, Tensor] = {}
        self._pin(groups, most_used([group.num_experts for group in groups], use, num_pinned))
        if num_pinned == len(records) > len(self._pinned):
            self._make_staging(slot_bytes)
        self._rates = rates or (self._measured(groups) if self._pinned and num_slots < len(records) else None)

    @property
    def num_pinned(self) -> int:
        """The number of experts that wait in locked memory."""
        return len(self._pinned)

    def where_it_lies(self, group: ExpertGroup, record: LayerRecord, rows: int) -> ExpertWeights | None:
        """Return a pinned expert's weights where computing so many rows there takes less time than moving it."""
        host = self._pinned.get(record.key)
        if host is None or self._rates is None:
            return None
        if not self._rates.stays(record.flat_bytes, row_flops=group.row_flops, rows=rows):
            return None
        return group.weights(_pieces(record, host), self._host_scratch)

    def has_time(self) -> bool:
        """Return whether the last copy has ended."""
        return self._slots.is_idle

    def bring(self, group: ExpertGroup, record: LayerRecord) -> Wait:
        """Issue one copy into a free slot, after the slot's last reader; another thread reads the files."""
        slot = self._slot_of[record.key] = self._free.pop()
        host = self._pinned.get(record.key)
        if host is None:
            return self._readers.submit(self._read, record, slot).result
        self._slots.fill(slot, host)
        return _is_there

    def acquire(self, group: ExpertGroup, record: LayerRecord) -> ExpertWeights:
        """Return the expert in its slot; compute issued from now on waits for the copy."""
        slot = self._slots.acquire(self._slot_of[record.key])
        return group.weights(_pieces(record, slot), self._scratch)

    def release(self, record: LayerRecord) -> None:
        """Let the next copy into the slot wait for the compute issued so far."""
        self._slots.release(self._slot_of[record.key])

    def drop(self, record: LayerRecord) -> None:
        """Let another expert have the slot."""
        self._free.append(self._slot_of.pop(record.key))

    def announce(self, record: LayerRecord) -> None:
        """Let the disk start on an expert that does not wait in memory."""
        if record.key not in self._pinned:
            self._readers.submit(self._store.announce, record)

    def clear(self) -> None:
        """Let all slots be filled anew, once no reading thread fills one."""
        self._readers.shutdown()
        self._readers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="edgespec-experts")
        self._slot_of.clear()
        self._free = list(range(self._slots.count))
        for slot in self._free:
            self._slots.release(slot)  # work that was issued may still read any of them

    def close(self) -> None:
        """Wait for the copies under way, and unlock the memory, which is about to be another's."""
        self._readers.shutdown(cancel_futures=True)
        self._slots.close()
        for buffer in self._pinned_buffers:
            buffer.close()
        self._pinned_buffers = []

    def _read(self, record: LayerRecord, slot: int) -> None:
        """Read an expert from the files into the slot, by way of a staging buffer."""
        self._store.announce(record)
        self._store.populate(record)
        staging = self._staging.get()
        try:
            staging.copied.synchronize()  # a reading thread waits for an old copy, nobody else does
            self._store.copy(record, staging.bytes)
            self._store.drop(record)
            self._slots.fill(slot, staging.bytes[: record.flat_bytes], staging)
        finally:
            self._staging.put(staging)

    def _pin(self, groups: Sequence[ExpertGroup], chosen: Sequence[Sequence[int]]) -> None:
        """Fill locked memory with the experts chosen of each layer, a buffer a layer, as far as we may lock it."""
        for group, experts in zip(groups, chosen, strict=True):
            if not experts:
                continue
            records = [group.experts[expert] for expert in experts]
            try:
                buffer = PinnedBuffer(len(records) * group.expert_flat_bytes, device=self._device)
            except PinningError as error:
                logger.warning(
                    "only %d of %d experts could be kept in locked memory (%s); the others are read from their files",
                    len(self._pinned), sum(map(len, chosen)), error,
                )  # fmt: skip
                return
            self._pinned_buffers.append(buffer)
            for record, host in zip(records, buffer.bytes.split(group.expert_flat_bytes), strict=True):
                self._store.populate(record)
                self._store.copy(record, host)
                self._store.drop(record)
                self._pinned[record.key] = host

    def _measured(self, groups: Sequence[ExpertGroup]) -> HostRates:
        """Measure what decides: copies of pinned experts to the device, and the host's arithmetic with them."""
        group = groups[0]
        records = [record for record in group.experts if record.key in self._pinned]
        bytes_per_s, flops_per_s = host_speed(
            group, [_pieces(record, self._pinned[record.key]) for record in records], self._host_scratch
        )
        self._slots.copy_stream.synchronize()
        started = time.perf_counter()
        for record in records[:COPIES_TIMED]:
            self._slots.fill(0, self._pinned[record.key])
        self._slots.copy_stream.synchronize()
        copied_bytes = sum(record.flat_bytes for record in records[:COPIES_TIMED])
        rates = HostRates(
            link_bytes_per_s=copied_bytes / (time.perf_counter() - started),
            bytes_per_s=bytes_per_s,
            flops_per_s=flops_per_s,
        )
        logger.info("an expert is moved at %.3g bytes/s, and computed where it lies at %.3g bytes/s, %.3g FLOP/s",
                    rates.link_bytes_per_s, bytes_per_s, flops_per_s)  # fmt: skip
        return rates

    def _make_staging(self, num_bytes: int) -> None:
        """Make a staging buffer for each reader, locked where possible; pageable ones block their reader."""
        for _ in range(NUM_READERS):
            try:
                buffer = PinnedBuffer(num_bytes, device=self._device)
                self._pinned_buffers.append(buffer)
                place = buffer.bytes
            except PinningError as error:
                logger.warning("cannot lock %d MiB (%s): copies to the device are slower", num_bytes >> 20, error)
                place = torch.empty(num_bytes, dtype=torch.uint8)
            self._staging.put(StagingBuffer(place, self._device.new_event(blocking=True)))


def _pieces(record: LayerRecord, flat: Tensor) -> dict[str, list[Tensor]]:
    """Return an expert's tensors in the flat buffer that holds it."""
    return {name: [view] for name, view in record.flat_views(flat).items()}


def _is_there() -> None:
    """Return at once: a copy that was issued is waited for on the device."""
