"""Layers from files in a small ring of host buffers, on their way to a device."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from offload.device_slots import StagingBuffer
from offload.direct_reads import open_direct
from offload.layer_store import LayerRecord, LayerStore


@dataclass(frozen=True, slots=True)
class _Read:
    """A layer that is being read."""

    record: LayerRecord
    buffer: StagingBuffer
    read: Future[None]


class StagingRing:
    """Brings layers into the buffers, on the reader's thread; the disk goes on with the next layer meanwhile.

    Layers that are `direct` are read past the page cache, where that is offered; the others by way of mapped pages.
    """

    def __init__(
        self,
        store: LayerStore,
        records: Sequence[LayerRecord],
        buffers: Sequence[StagingBuffer],
        *,
        direct: Sequence[LayerRecord],
    ) -> None:
        self._store, self._buffers = store, buffers
        self._following = following(records)
        direct = [record for record in direct if record.is_stored_as_computed]
        self._files = open_direct(direct)
        self._direct = {record.index for record in direct} if self._files is not None else set[int]()
        self._ahead: _Read | None = None  # of the layer that probably comes next
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="edgespec-staging")  # one read after the other
        self._num_used = 0  # buffers

    def fill(self, record: LayerRecord) -> StagingBuffer:
        """Return a buffer that holds the layer; raises StreamError."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead.record is not record:  # the ring was wound, or this layer is never read ahead
            ahead = self._begin(record)
        ahead.read.result()
        return ahead.buffer

    def go_on(self, record: LayerRecord) -> None:
        """Let the disk start on the layer after this one, whose copy is issued."""
        after = self._following[record.index]
        if after.index in self._direct:
            self._ahead = self._begin(after)

    def close(self) -> None:
        """End all reading."""
        self._aside.shutdown()
        if self._files is not None:
            self._files.close()

    def _read(self, record: LayerRecord, buffer: StagingBuffer) -> None:
        buffer.copied.synchronize()  # only this thread waits for an old copy
        if self._files is not None and record.index in self._direct:
            self._store.read_by(self._files.read, record, buffer.bytes)
            return
        self._store.populate(record)
        # The disk goes on while those between are copied from locked memory.
        self._store.announce(self._following[record.index])
        self._store.copy(record, buffer.bytes)
        self._store.drop(record)

    def _begin(self, record: LayerRecord) -> _Read:
        buffer = self._buffers[self._num_used % len(self._buffers)]
        self._num_used += 1
        return _Read(record, buffer, self._aside.submit(self._read, record, buffer))


def following(records: Sequence[LayerRecord]) -> dict[int, LayerRecord]:
    """Return layer index -> the record that comes after it, the first after the last."""
    return {record.index: records[(position + 1) % len(records)] for position, record in enumerate(records)}
