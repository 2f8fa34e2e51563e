"""The ring reads layers ahead in one thread and hands them out in order.

Ring positions count for ever: position p carries layer p % num_layers in slot p % num_slots, so
any layer count works with any slot count, and after the last layer of a pass the first layers of
the next one load at once, while a draft model grows the next tree. What a slot is (a buffer on a
device, or a range of mapped pages) is the loader's business.
"""

import atexit
import os
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from offload.layer_store import LayerRecord


class SlotLoader(Protocol):
    """Moves layers into slots. `load` runs on the reader's thread, the others on the caller's."""

    @property
    def pinned_layers(self) -> frozenset[int]:
        """The layers that wait in locked memory."""

    def load(self, record: LayerRecord, slot: int) -> None:
        """Bring the layer into the slot; the load may only be issued, not finished, when this returns."""

    def acquire(self, record: LayerRecord, slot: int) -> dict[str, Tensor]:
        """Return the layer's weights, usable by work issued from now on."""

    def release(self, record: LayerRecord, slot: int) -> None:
        """Take the slot back once the work that reads it is issued: it may be loaded again after that work."""

    def close(self) -> None:
        """End all loading: nothing is loaded any more when this returns."""


class LayerStream:
    """Hands out layers in order, again and again.

    A layer's weights are valid from `acquire` until `release`. An error while reading comes out of
    the `acquire` of the layer. After an error, or when a pass is abandoned half way,
    the next `acquire` winds the ring to its layer. `close` ends the thread.
    """

    def __init__(self, records: Sequence[LayerRecord], loader: SlotLoader, *, num_slots: int) -> None:
        self._records = tuple(records)
        self._ring_index = {record.index: position for position, record in enumerate(self._records)}
        self._loader = loader
        self._num_slots = num_slots
        # Held by `with` itself: a condition's own `with` calls Python code, where an interrupt would leave it held.
        self._lock = threading.RLock()
        self._condition = threading.Condition(self._lock)
        self._next_load = 0  # position the reader loads next
        self._next_use = 0  # position `acquire` hands out next
        self._first_held = 0  # positions from here on occupy their slots
        self._loaded: dict[int, Exception | None] = {}
        self._epoch = 0  # grows when the ring is wound, so that a load under way is not taken for a new one
        self._closed = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._read_ahead, name="edgespec-reader", daemon=True)
        self._thread.start()
        self.meanwhile: Callable[[], bool] | None = None  # a little of other work; whether there was any
        # A thread that is inside torch when the interpreter goes away would abort the process.
        atexit.register(self.close)

    def acquire(self, layer: int) -> dict[str, Tensor]:
        """Return the layer's weights; wait until they are loaded, and raise the reader's error.

        What is to be done `meanwhile` is done until they are, or there is none left.
        """
        ring_index = self._ring_index[layer]
        with self._lock:
            in_order = self._next_use % len(self._records) == ring_index and self._first_held == self._next_use
            # An error met while reading ahead may be mended by now: only a load begun after this call decides.
            if not in_order or self._loaded.get(self._next_use) is not None:
                self._wind_to(ring_index)
            self._condition.notify_all()  # an interrupt may have kept the reader from hearing of the last change
        while self.meanwhile is not None and not self._may_go_on() and self.meanwhile():
            pass
        with self._lock:
            self._condition.wait_for(self._may_go_on)
            if self._closed:
                raise RuntimeError("the layer stream is closed")
            # Counted first: an interrupt between these two lines leaves the ring out of order, which winds it.
            position = self._next_use
            self._next_use += 1
            error = self._loaded.pop(position)
            if error is not None:
                self._wind_to(ring_index)
                raise error
        return self._loader.acquire(self._records[ring_index], position % self._num_slots)

    def _may_go_on(self) -> bool:
        return self._closed or self._next_use in self._loaded

    def release(self, layer: int) -> None:
        """Give the layer back that was acquired last."""
        self._loader.release(self._records[self._ring_index[layer]], (self._next_use - 1) % self._num_slots)
        with self._lock:
            self._first_held = self._next_use
            self._condition.notify_all()

    def close(self) -> None:
        """Stop the reader, and return when it is gone; in a forked process there is none."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self._closed = True
            self._condition.notify_all()
        self._thread.join()
        self._loader.close()
        atexit.unregister(self.close)

    def _wind_to(self, ring_index: int) -> None:
        """Forget what is loaded and start again at a layer. The condition is held."""
        num_layers = len(self._records)
        # A pass that was left inside a layer gave nothing back, and work that it issued may still read the slot.
        for position in range(self._first_held, self._next_use):
            self._loader.release(self._records[position % num_layers], position % self._num_slots)
        self._epoch += 1
        self._next_load += (ring_index - self._next_load) % num_layers
        self._next_use = self._first_held = self._next_load
        self._loaded.clear()
        self._condition.notify_all()

    def _read_ahead(self) -> None:
        while True:
            with self._lock:
                self._condition.wait_for(lambda: self._closed or self._next_load - self._first_held < self._num_slots)
                if self._closed:
                    return
                position, epoch = self._next_load, self._epoch
            error: Exception | None = None
            try:
                self._loader.load(self._records[position % len(self._records)], position % self._num_slots)
            except Exception as caught:  # raised by `acquire`
                error = caught
            with self._lock:
                if epoch == self._epoch:
                    self._loaded[position] = error
                    self._next_load = position + 1
                    self._condition.notify_all()
