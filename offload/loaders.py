"""The two ways into a slot: on a CPU, and onto a CUDA device. Device differences live here.

CPU: a slot is a range of mapped pages, read ahead and let go after use; when the layer is computed
in another dtype than it is stored in, a slot is a flat buffer that the reader converts into.

CUDA: a slot is a flat device buffer. The copy stream waits for the slot's last reader, and compute
waits for the copy, both by events, so that nothing ever synchronises the device.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from offload.layer_store import LayerRecord, LayerStore
from offload.placement import NUM_STAGING_BUFFERS

logger = logging.getLogger("edgespec.offload")


class CpuLoader:
    """Slots in main memory."""

    def __init__(self, store: LayerStore, records: Sequence[LayerRecord], *, num_slots: int) -> None:
        self._store = store
        self._following = _following(records)
        flat_bytes = max((record.flat_bytes for record in records if record.is_converted), default=0)
        self._flat = [torch.empty(flat_bytes, dtype=torch.uint8) for _ in range(num_slots if flat_bytes else 0)]

    def load(self, record: LayerRecord, slot: int) -> None:
        """Read the layer's pages; convert them into the slot where the dtype changes."""
        self._store.populate(record.entries.values())
        # The disk goes on with the next layer while this thread converts, or waits for a slot.
        self._store.announce(self._following[record.index].entries.values())
        if record.is_converted:
            copy_layer(self._store, record, self._flat[slot])
            self._store.drop(record.entries.values())

    def hand_out(self, record: LayerRecord, slot: int) -> dict[str, Tensor]:
        """Views of the slot, or of the file itself."""
        return record.flat_views(self._flat[slot]) if record.is_converted else self._store.views(record)

    def take_back(self, record: LayerRecord, slot: int) -> None:
        """Let the file's pages go; a converted layer's are gone already."""
        if not record.is_converted:
            self._store.drop(record.entries.values())

    def close(self) -> None:
        """Loads end with the reader's thread."""


class CudaLoader:
    """Slots on a CUDA device, fed from pinned memory or, for layers not pinned, through staging buffers."""

    def __init__(
        self,
        store: LayerStore,
        records: Sequence[LayerRecord],
        *,
        num_slots: int,
        pinned_layers: frozenset[int],
        device: torch.device,
    ) -> None:
        flat_bytes = max(record.flat_bytes for record in records)
        self._store = store
        self._device = device
        self._following = _following(records)
        self._slots = [torch.empty(flat_bytes, dtype=torch.uint8, device=device) for _ in range(num_slots)]
        self._copy_stream = torch.cuda.Stream(device)
        self._copy_stream.wait_stream(torch.cuda.current_stream(device))  # the slots' memory may still be read
        self._copied = [torch.cuda.Event() for _ in range(num_slots)]
        self._released = [torch.cuda.Event() for _ in range(num_slots)]
        self._pinned: dict[int, Tensor] = {}
        for record in records:
            if record.index in pinned_layers:
                self._pinned[record.index] = host_buffer(record.flat_bytes)
                store.populate(record.entries.values())
                copy_layer(store, record, self._pinned[record.index])
                store.drop(record.entries.values())
        all_pinned = len(self._pinned) == len(records)
        self._staging = [host_buffer(flat_bytes) for _ in range(0 if all_pinned else NUM_STAGING_BUFFERS)]
        self._staged = [torch.cuda.Event() for _ in self._staging]
        self._next_staging = 0

    def load(self, record: LayerRecord, slot: int) -> None:
        """Issue one copy into the slot, after the last reader of the slot."""
        host = self._pinned.get(record.index)
        staging = None
        if host is None:
            staging = self._next_staging
            self._next_staging = (staging + 1) % len(self._staging)
            self._staged[staging].synchronize()  # the reader's thread waits for an old copy, nobody else does
            host = self._staging[staging]
            self._store.populate(record.entries.values())
            following = self._following[record.index]
            if following.index not in self._pinned:
                self._store.announce(following.entries.values())
            copy_layer(self._store, record, host)
            self._store.drop(record.entries.values())
        num_bytes = record.flat_bytes
        with torch.cuda.stream(self._copy_stream):
            self._copy_stream.wait_event(self._released[slot])
            self._slots[slot][:num_bytes].copy_(host[:num_bytes], non_blocking=True)
            self._copied[slot].record(self._copy_stream)
            if staging is not None:
                self._staged[staging].record(self._copy_stream)

    def hand_out(self, record: LayerRecord, slot: int) -> dict[str, Tensor]:
        """Views of the slot; compute issued from now on waits for the copy."""
        torch.cuda.current_stream(self._device).wait_event(self._copied[slot])
        return record.flat_views(self._slots[slot])

    def take_back(self, record: LayerRecord, slot: int) -> None:
        """The next copy into the slot waits for the compute issued so far."""
        self._released[slot].record(torch.cuda.current_stream(self._device))

    def close(self) -> None:
        """Wait for the copies under way: their slots' memory is about to be another's."""
        self._copy_stream.synchronize()


def _following(records: Sequence[LayerRecord]) -> dict[int, LayerRecord]:
    """Layer index -> the record that the ring loads after it."""
    return {record.index: records[(position + 1) % len(records)] for position, record in enumerate(records)}


def copy_layer(store: LayerStore, record: LayerRecord, flat: Tensor) -> None:
    """Copy a stored layer into a flat buffer, in its compute dtypes."""
    for name, destination in record.flat_views(flat).items():
        destination.copy_(store.view(record.entries[name]))


def host_buffer(num_bytes: int) -> Tensor:
    """A pinned buffer, or a pageable one with a warning where the system refuses to pin."""
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        logger.warning("cannot pin %d MiB (%s); copies from pageable memory are slower", num_bytes >> 20, error)
        return torch.empty(num_bytes, dtype=torch.uint8)
