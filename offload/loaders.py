"""The two ways into a slot: on a CPU, and onto a CUDA device. The differences between devices live here.

CPU: a slot is a range of mapped pages, read ahead and let go after use; when the layer is computed
in another dtype than it is stored in, a slot is a flat buffer that the reader converts into.

CUDA: a slot is a flat device buffer (`device_slots.py`), filled from locked memory or by way of staging buffers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from offload.device import Device
from offload.device_slots import DeviceSlots
from offload.layer_store import LayerRecord, LayerStore
from offload.pinned import PinnedRecords
from offload.placement import NUM_STAGING_BUFFERS, staging_part_bytes
from offload.staging import StagingRing, following

GOLDEN_SECTION = 0.6180339887498949


class CpuLoader:
    """Loads layers into slots in main memory."""

    pinned_layers: frozenset[int] = frozenset()

    def __init__(
        self, store: LayerStore, records: Sequence[LayerRecord], *, num_slots: int, keeps_cached: bool = True
    ) -> None:
        """Pages that the system's cache cannot hold for the next pass are not to be kept there: others would go."""
        self._store = store
        self._from_cache = not keeps_cached
        self._following = following(records)
        flat_bytes = max(record.copied.flat_bytes for record in records)
        self._flat = [torch.empty(flat_bytes, dtype=torch.uint8) for _ in range(num_slots)]
        self._views: dict[tuple[int, int], dict[str, Tensor]] = {}

    def load(self, record: LayerRecord, slot: int) -> None:
        """Read the layer's pages; copy into the slot what is computed with in another form than the file's."""
        self._store.populate(record)
        # The disk goes on with the next layer while this thread converts, or waits for a slot.
        self._store.announce(self._following[record.index].ranges)
        if record.copied.tensors:
            self._store.copy(record.copied, self._flat[slot])
            self._store.drop(record.copied, from_cache=self._from_cache)

    def acquire(self, record: LayerRecord, slot: int) -> dict[str, Tensor]:
        """Return views of the slot and of the file; they are made once."""
        views = self._views.get((record.index, slot))
        if views is None:
            views = self._store.views(record.mapped) | record.copied.flat_views(self._flat[slot])
            self._views[record.index, slot] = views
        return views

    def release(self, record: LayerRecord, slot: int) -> None:
        """Let the file's pages go; those of copied tensors are gone already."""
        self._store.drop(record.mapped, from_cache=self._from_cache)

    def close(self) -> None:
        """Do nothing: loads end with the reader's thread."""


class CudaLoader:
    """Loads layers into slots on a CUDA device.

    Pinned layers are copied from pinned memory, the others through staging buffers.
    """

    def __init__(
        self,
        store: LayerStore,
        records: Sequence[LayerRecord],
        *,
        num_slots: int,
        pinned_layers: frozenset[int],
        device: Device,
    ) -> None:
        flat_bytes = max(record.flat_bytes for record in records)
        self._slots = DeviceSlots(device, num_slots=num_slots, slot_bytes=flat_bytes)
        self._views: dict[tuple[int, int], dict[str, Tensor]] = {}
        self._pinned = PinnedRecords(store, device)
        # The staging ring first: where little can be locked, it is what matters.
        buffers = self._pinned.staging_buffers(NUM_STAGING_BUFFERS, staging_part_bytes(flat_bytes))
        on_disk = [record for record in records if record.index not in pinned_layers]
        to_pin = [record for record in records if record.index in pinned_layers]
        # Multiples of the golden section, without their whole parts: wherever locking ends, the gaps are nearly equal.
        in_order = sorted(range(len(to_pin)), key=lambda place: place * GOLDEN_SECTION % 1)
        self._pinned.fill([[to_pin[place]] for place in in_order], "layers")
        staged = [record for record in records if record.key not in self._pinned.weights]
        if not staged:
            buffers = []
            self._pinned.close_staging()
        # There was to be memory for the others: the page cache may have it, and then keeps them.
        self._staging = StagingRing(store, staged, buffers, direct=on_disk)

    @property
    def pinned_layers(self) -> frozenset[int]:
        """The layers that wait in locked memory: fewer than were planned where the system locks no more."""
        return frozenset(layer for layer, _ in self._pinned.weights)

    def load(self, record: LayerRecord, slot: int) -> None:
        """Issue the copies into the slot, after the last reader of the slot."""
        host = self._pinned.weights.get(record.key)
        if host is not None:
            self._slots.fill(slot, host)
            return
        for part, staging in self._staging.parts(record):
            self._slots.fill(slot, staging.bytes[: part.end - part.start], staging, at=part.start)

    def acquire(self, record: LayerRecord, slot: int) -> dict[str, Tensor]:
        """Return views of the slot, made once; compute issued from now on waits for the copy."""
        flat = self._slots.acquire(slot)
        views = self._views.get((record.index, slot))
        if views is None:
            views = self._views[record.index, slot] = record.flat_views(flat)
        return views

    def release(self, record: LayerRecord, slot: int) -> None:
        """Let the next copy into the slot wait for the compute issued so far."""
        self._slots.release(slot)

    def close(self) -> None:
        """Wait for reads and copies under way, and unlock the memory, which is about to be another's."""
        try:
            self._staging.close()
            self._slots.close()
        finally:  # a device that has failed refuses to wait, and has stopped reading
            self._pinned.close()
