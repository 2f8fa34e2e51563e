"""Experts in main memory are the mapped pages of the checkpoint's files: only requested ones are read.

They are computed where they lie, by the CPU, whatever device the rest of the model is on.
"""

from concurrent.futures import ThreadPoolExecutor

import torch

from offload.experts.expert_group import ExpertGroup, ExpertWeights
from offload.experts.expert_source import HOST, Wait
from offload.layer_store import LayerRecord, LayerStore

NUM_READERS = 4  # threads, which wait for the disk most of the time


class CpuExperts:
    """Experts as pages of files; packed ones, and those of another dtype, become weights when they compute."""

    device = HOST
    num_pinned = 0

    def __init__(self, store: LayerStore, *, num_scratch: int, dtype: torch.dtype, keeps_cached: bool) -> None:
        """Pages that the system's cache cannot hold are not to be kept there: those of experts that stay would go."""
        self._store = store
        self._from_cache = not keeps_cached
        self._scratch = torch.empty(num_scratch, dtype=dtype)
        self._readers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="edgespec-experts")

    def where_it_lies(self, group: ExpertGroup, record: LayerRecord, rows: int) -> ExpertWeights | None:
        """Return None: experts are computed where they lie once they are read."""
        return None

    def has_time(self) -> bool:
        """Return False: every expert is waited for."""
        return False

    def bring(self, group: ExpertGroup, record: LayerRecord) -> Wait:
        """Read the expert's pages in another thread."""
        self._store.watch(record)
        return self._readers.submit(self._read, record).result

    def acquire(self, group: ExpertGroup, record: LayerRecord) -> ExpertWeights:
        """Return the expert's weights where they lie in the file, as far as they can be computed with."""
        return group.weights(self._store.pieces(record), self._scratch)

    def release(self, record: LayerRecord) -> None:
        """Do nothing: computing with the expert has ended."""

    def drop(self, record: LayerRecord) -> None:
        """Let the expert's pages go."""
        self._store.unwatch(record)
        self._store.drop(record, from_cache=self._from_cache)

    def announce(self, record: LayerRecord) -> None:
        """Let the disk start on the expert, after those that were requested before."""
        self._readers.submit(self._store.announce, record.ranges)

    def clear(self) -> None:
        """Do nothing: the system takes pages of files back by itself."""

    def close(self) -> None:
        """End the reading threads."""
        self._readers.shutdown(cancel_futures=True)

    def _read(self, record: LayerRecord) -> None:
        self._store.announce(record.ranges)  # all of it at once: pages are read in far smaller steps
        self._store.populate(record)
