"""A device that does its work as late, and in as odd an order, as a real one may.

A stream is a queue of closures, which read memory when they are executed. Whenever the host gives it work, the next of
`choices`, which repeat for ever, says which stream advances and how far; and so it is while the host waits. Work
that does not wait for other work comes too early for some choices, and too late for others.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.device import PinningError
from tests.support.allocator import RoundingAllocator

ANOTHERS = 0xEE  # what whoever gets unlocked memory next writes there
Work = Callable[[], object]


@dataclass(slots=True)
class Mark:
    """The place of an event in a stream."""

    is_passed: bool = False


class SimulatedEvent:
    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self.mark = Mark(is_passed=True)

    def record(self, stream: SimulatedStream) -> None:
        mark = Mark()
        stream.give(lambda: setattr(mark, "is_passed", True))
        self.mark = mark

    def synchronize(self) -> None:
        mark = self.mark
        self._device.run_until(lambda: mark.is_passed)

    def query(self) -> bool:
        self._device.check()
        return self.mark.is_passed


class SimulatedStream:
    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self._work: deque[tuple[Mark, Work]] = deque()

    def give(self, work: Work, *, after: Mark | None = None) -> None:
        """Append work that reads and writes memory when its turn comes."""
        self._device.check()
        with self._device.lock_of_work:
            self._work.append((after or Mark(is_passed=True), work))
            self._device.advance()

    def wait_event(self, event: SimulatedEvent) -> None:
        self.give(lambda: None, after=event.mark)

    def wait_stream(self, stream: SimulatedStream) -> None:
        event = SimulatedEvent(self._device)
        event.record(stream)
        self.wait_event(event)

    def synchronize(self) -> None:
        self._device.run_until(lambda: not self._work)

    @property
    def can_run(self) -> bool:
        return bool(self._work) and self._work[0][0].is_passed

    def run_one(self) -> None:
        if self.can_run:
            self._work.popleft()[1]()


class SimulatedDevice:
    """The streams are numbered as they were made; the first is the current one. `choices` are those of `_chosen`.

    An eager device does all work at once. `max_locked_bytes` of the host's memory can be locked; `allocator` gives the
    device's. Once `error` is set, every call raises it, as those of a card do after a kernel has failed.
    """

    def __init__(
        self,
        choices: Sequence[int] = (0,),
        *,
        is_eager: bool = False,
        max_locked_bytes: int | None = None,
        allocator: RoundingAllocator | None = None,
    ) -> None:
        self.torch_device = torch.device("cpu")
        self.lock_of_work = threading.RLock()  # the host's threads ask for work at the same time
        self.pinned: dict[int, int] = {}  # address -> bytes
        self.faults: list[str] = []
        self.error: Exception | None = None
        self.allocator = allocator or RoundingAllocator()
        self._max_locked_bytes = max_locked_bytes
        self._choices = itertools.cycle(choices)
        self._is_eager = is_eager
        self._free: list[Tensor] = []
        self._streams: list[SimulatedStream] = []
        self._current = self.new_stream()

    def check(self) -> None:
        """Raise the error that a kernel has left."""
        if self.error is not None:
            raise self.error

    def empty(self, num_bytes: int) -> Tensor:
        self.check()
        if self._free:
            return self._free.pop()[:num_bytes]
        block = self.allocator.take(num_bytes)
        memory = torch.zeros(num_bytes, dtype=torch.uint8)
        weakref.finalize(memory.untyped_storage(), self.allocator.give, block)
        return memory

    def let_go(self, memory: Tensor) -> None:
        """Give device memory to whoever asks next, as torch's allocator does, even while it is being read."""
        self._free.append(memory)

    def new_stream(self) -> SimulatedStream:
        self._streams.append(SimulatedStream(self))
        return self._streams[-1]

    def current_stream(self) -> SimulatedStream:
        return self._current

    def new_event(self, *, blocking: bool = False) -> SimulatedEvent:
        return SimulatedEvent(self)

    def copy(self, source: Tensor, destination: Tensor, stream: SimulatedStream) -> None:
        if not self._is_locked(source):
            source = source.clone()  # as the driver does with pageable memory, before the call returns
            stream.give(lambda: destination.copy_(source))
            return

        def read() -> None:
            if not self._is_locked(source):
                self.faults.append("memory was read that is not locked any more")
            destination.copy_(source)

        stream.give(read)

    def copy_back(self, source: Tensor, destination: Tensor) -> None:
        if not self._is_locked(destination):
            self._current.synchronize()  # the driver returns when pageable memory has it
            destination.copy_(source)
            return

        def write() -> None:
            if not self._is_locked(destination):
                self.faults.append("memory was written to that is not locked any more")
            destination.copy_(source)

        self._current.give(write)

    def lock(self, memory: Tensor) -> None:
        self.check()
        if self._max_locked_bytes is not None and sum(self.pinned.values()) + memory.nbytes > self._max_locked_bytes:
            raise PinningError("the limit on locked memory is reached")
        self.pinned[memory.data_ptr()] = memory.nbytes

    def unlock(self, memory: Tensor) -> None:
        del self.pinned[memory.data_ptr()]
        memory.fill_(ANOTHERS)

    def advance(self) -> None:
        """Do as much work as is chosen."""
        if self._is_eager:
            self.finish()
            return
        stream, num_pieces = self._chosen()
        for _ in range(num_pieces):
            stream.run_one()

    def run_until(self, is_done: Callable[[], bool]) -> None:
        """Do work of streams that can go on, the chosen one before others, until the host need not wait any more."""
        self.check()
        with self.lock_of_work:
            while not is_done():
                able = [stream for stream in (self._chosen()[0], *self._streams) if stream.can_run]
                assert able, "the streams wait for each other"
                able[0].run_one()

    def _chosen(self) -> tuple[SimulatedStream, int]:
        """Return a stream and how many pieces of work it does, by the next choice: 0 is none, 1 to n one, and so on."""
        num_pieces, number = divmod(next(self._choices) - 1 + len(self._streams), len(self._streams))
        return self._streams[number], num_pieces

    def finish(self) -> None:
        """Do all the work that was given."""
        with self.lock_of_work:
            for stream in self._streams:
                stream.synchronize()

    def _is_locked(self, memory: Tensor) -> bool:
        return memory.untyped_storage().data_ptr() in self.pinned
