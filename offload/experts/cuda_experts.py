"""Experts on a CUDA device: slots of one expert each, filled from pinned memory or from the files.

An expert in pinned memory whose few rows the host computes sooner than it moves stays there, and comes afterwards.
"""

import logging
import queue
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from offload.device import Device
from offload.device_slots import DeviceSlots, StagingBuffer
from offload.experts.cpu_experts import NUM_READERS
from offload.experts.expert_group import ExpertGroup, ExpertWeights
from offload.experts.expert_source import Wait
from offload.experts.expert_use import most_used
from offload.experts.mixture import products
from offload.layer_store import LayerRecord, LayerStore, RecordKey
from offload.pinned import PinnedRecords
from offload.placement import ExpertPlacement
from profiles.in_place import HostRates

MEASURED_BYTES = 256 << 20  # of experts, one after the other: more than a processor's own caches hold
MANY_ROWS = 32  # whose arithmetic takes longer than reading the weights
MANY_EXPERTS = 4

Stored = Mapping[str, Sequence[Tensor]]  # an expert's tensors, in pieces


def host_speed(group: ExpertGroup, stored: Sequence[Stored], scratch: Tensor) -> tuple[float, float]:
    """Return the bytes of experts that the host computes with in a second, as stored, and its operations a second.

    `stored` are experts of the group, as many different ones as there are; `scratch` is on the host.
    """
    few = stored[: max(1, MEASURED_BYTES // group.expert_stored_bytes)]
    _seconds(group, few[:1], scratch, rows=MANY_ROWS)  # the first products start torch's threads
    one_row_s = _seconds(group, few, scratch, rows=1) / len(few)
    many_rows_s = _seconds(group, stored[:MANY_EXPERTS], scratch, rows=MANY_ROWS) / len(stored[:MANY_EXPERTS])
    return group.expert_stored_bytes / one_row_s, MANY_ROWS * group.row_flops / many_rows_s


def _seconds(group: ExpertGroup, stored: Sequence[Stored], scratch: Tensor, *, rows: int) -> float:
    inputs = [
        torch.ones(rows, matrix.shape[1] if matrix.in_blocks else matrix.shape[0], dtype=scratch.dtype)
        for matrix in group.matrices
    ]
    started = time.perf_counter()
    for expert in stored:
        weights = group.weights(expert, scratch)
        for matrix, rows_in in zip(group.matrices, inputs, strict=True):
            products(weights[matrix.attribute], rows_in)
    return time.perf_counter() - started


logger = logging.getLogger("edgespec.offload")

COPIES_TIMED = 8


class CudaExperts:
    """Experts in slots of a device, as many as `placement` keeps.

    Those of all layers that are used most wait in pinned memory, as far as the system lets them be locked; the others
    pass through staging buffers. `rates` decide which experts are computed where they lie; None measures them.
    """

    def __init__(
        self,
        store: LayerStore,
        groups: Sequence[ExpertGroup],
        *,
        placement: ExpertPlacement,
        num_scratch: int,
        dtype: torch.dtype,
        device: Device,
        rates: HostRates | None = None,
    ) -> None:
        num_slots, num_pinned = placement.num_kept, placement.num_pinned
        slot_bytes = max(group.expert_flat_bytes for group in groups)
        self._store, self.device = store, device.torch_device
        self._host_scratch = torch.empty(num_scratch, dtype=dtype)
        self._slots = DeviceSlots(device, num_slots=num_slots, slot_bytes=slot_bytes)
        self._scratch = device.empty(num_scratch * dtype.itemsize).view(dtype)
        self._free = list(range(num_slots))
        self._slot_of: dict[RecordKey, int] = {}
        self._staging: queue.SimpleQueue[StagingBuffer] = queue.SimpleQueue()
        self._readers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="edgespec-experts")
        num_experts = sum(group.num_experts for group in groups)
        self._pinned_records = PinnedRecords(store, device)
        # The staging buffers first: where little can be locked, they are what matters.
        staging = self._pinned_records.staging_buffers(NUM_READERS, slot_bytes)
        chosen = most_used([group.num_experts for group in groups], placement.use, num_pinned)
        pinned = [[group.experts[expert] for expert in of] for group, of in zip(groups, chosen, strict=True) if of]
        self._pinned_records.fill(pinned, "experts")
        self._pinned = self._pinned_records.weights
        for buffer in staging:
            self._staging.put(buffer)
        self._rates = rates or (self._measured(groups) if self._pinned and num_slots < num_experts else None)

    @property
    def num_pinned(self) -> int:
        """The number of experts that wait in locked memory."""
        return len(self._pinned)

    def where_it_lies(self, group: ExpertGroup, record: LayerRecord, rows: int) -> ExpertWeights | None:
        """Return a pinned expert's weights where computing the rows there takes less time than moving it."""
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
            self._readers.submit(self._store.announce, record.ranges)

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
        try:
            self._slots.close()
        finally:  # a device that has failed refuses to wait, and has stopped reading
            self._pinned_records.close()

    def _read(self, record: LayerRecord, slot: int) -> None:
        """Read an expert from the files into the slot, by way of a staging buffer."""
        self._store.announce(record.ranges)
        self._store.populate(record)
        staging = self._staging.get()
        try:
            staging.copied.synchronize()  # only a reading thread waits for an old copy
            self._store.copy(record, staging.bytes)
            self._store.drop(record)
            self._slots.fill(slot, staging.bytes[: record.flat_bytes], staging)
        finally:
            self._staging.put(staging)

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


def _pieces(record: LayerRecord, flat: Tensor) -> dict[str, list[Tensor]]:
    """Return an expert's tensors in the flat buffer that holds it."""
    return {name: [view] for name, view in record.flat_views(flat).items()}


def _is_there() -> None:
    """Return at once: a copy that was issued is waited for on the device."""
