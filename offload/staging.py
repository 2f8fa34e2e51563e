"""Layers from files in a small ring of host buffers, on their way to a device.

A layer comes in parts, so that the ring takes little of the memory that a system lets us lock. While a part is copied
to the device, the next ones are read: those of the same layer, then of the one that comes next.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from offload.checkpoint import TensorEntry
from offload.device_slots import StagingBuffer
from offload.direct_reads import open_direct
from offload.errors import read_errors
from offload.layer_parts import LayerPart, parts_of
from offload.layer_store import LayerRecord, LayerStore

NUM_FILLING = 2  # threads: one brings pages in while the other copies them


@dataclass(frozen=True, slots=True)
class _Read:
    """A part that is being read."""

    part: LayerPart
    buffer: StagingBuffer
    read: Future[None]


class StagingRing:
    """Brings layers into the buffers, part by part, and reads ahead as far as these reach.

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
        self._parts = {record.index: parts_of(record, buffers[0].bytes.numel()) for record in records}
        direct = [record for record in direct if record.is_stored_as_computed]
        self._files = open_direct(direct)
        self._direct = {record.index for record in direct} if self._files is not None else set[int]()
        self._ahead: deque[_Read] = deque()  # parts that probably come next, in order
        self._coming: Iterator[LayerPart] = iter(())  # those after them
        self._aside = ThreadPoolExecutor(NUM_FILLING, thread_name_prefix="edgespec-staging")
        self._num_used = 0  # buffers

    def parts(self, record: LayerRecord) -> Iterator[tuple[LayerPart, StagingBuffer]]:
        """Yield the layer's parts, each in a buffer whose copy has to be issued before the next; raises StreamError.

        The file is compared with what was read before once the last part is there.
        """
        parts = self._parts[record.index]
        if not self._ahead or self._ahead[0].part is not parts[0]:  # the ring was wound
            self._wait_for_reads()
            self._ahead.clear()
            self._coming = self._parts_from(record)
        samples: dict[TensorEntry, bytes] = {}
        for part in parts:
            self._read_ahead(len(self._buffers))  # the last one's copy is issued
            read = self._ahead.popleft()
            read.read.result()
            part.add_samples(read.buffer.bytes, samples)
            yield part, read.buffer
        self._read_ahead(len(self._buffers))
        self._store.check_unchanged(record, [samples[entry] for entry in record.entries])

    def close(self) -> None:
        """End all reading."""
        self._aside.shutdown()
        if self._files is not None:
            self._files.close()

    def _parts_from(self, record: LayerRecord) -> Iterator[LayerPart]:
        while True:
            yield from self._parts[record.index]
            record = self._following[record.index]

    def _read_ahead(self, most: int) -> None:
        """Read until so many buffers are filled or being filled."""
        while len(self._ahead) < most:
            part, buffer = next(self._coming), self._buffers[self._num_used % len(self._buffers)]
            self._num_used += 1
            self._ahead.append(_Read(part, buffer, self._aside.submit(self._read, part, buffer)))

    def _wait_for_reads(self) -> None:
        """Return when no buffer is being filled; what is read in vain may have failed."""
        for ahead in self._ahead:
            if not ahead.read.cancel():
                ahead.read.exception()

    def _read(self, part: LayerPart, buffer: StagingBuffer) -> None:
        buffer.copied.synchronize()  # only this thread waits for an old copy
        if self._files is not None and part.record.index in self._direct:
            with read_errors():
                self._files.read(part, buffer.bytes)
            return
        if part.start == 0:  # the disk may go on with all of the layer
            self._store.announce(part.record.ranges)
        part.read(self._store, buffer.bytes)


def following(records: Sequence[LayerRecord]) -> dict[int, LayerRecord]:
    """Return layer index -> the record that comes after it, the first after the last."""
    return {record.index: records[(position + 1) % len(records)] for position, record in enumerate(records)}
