"""The ring: order, reuse, wrap-around, errors, and abandoned passes, with loaders of any speed."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from offload.layer_store import LayerRecord
from offload.stream import LayerStream
from tests.offload.streaming import reader_threads


def records(count: int, first: int = 0) -> list[LayerRecord]:
    return [LayerRecord(index=first + index, tensors={}) for index in range(count)]


class SlotMemory:
    """Slots that hold the index of the layer loaded last, and see when a slot in use is overwritten."""

    def __init__(self, num_slots: int, *, load_s: float = 0.0) -> None:
        self.slots: list[int | None] = [None] * num_slots
        self.in_use: set[int] = set()
        self.begun: list[int] = []
        self.loaded: list[int] = []
        self.load_s = load_s
        self.fail_on: dict[int, int] = {}  # layer -> failures to come
        self.overwritten = False

    def load(self, record: LayerRecord, slot: int) -> None:
        self.begun.append(record.index)
        time.sleep(self.load_s)
        self.loaded.append(record.index)
        if self.fail_on.get(record.index, 0) > 0:
            self.fail_on[record.index] -= 1
            raise OSError(f"layer {record.index} cannot be read")
        self.overwritten |= slot in self.in_use
        self.slots[slot] = record.index

    def acquire(self, record: LayerRecord, slot: int) -> dict[str, Tensor]:
        self.in_use.add(slot)
        found = self.slots[slot]
        assert found is not None
        return {"index": torch.tensor(found)}

    def release(self, record: LayerRecord, slot: int) -> None:
        self.in_use.discard(slot)

    def close(self) -> None:
        pass


@contextmanager
def ring(
    count: int, num_slots: int, *, load_s: float = 0.0, first: int = 0
) -> Iterator[tuple[LayerStream, SlotMemory]]:
    memory = SlotMemory(num_slots, load_s=load_s)
    stream = LayerStream(records(count, first), memory, num_slots=num_slots)
    try:
        yield stream, memory
    finally:
        stream.close()


def run_pass(stream: LayerStream, layers: range, *, compute_s: float = 0.0) -> list[int]:
    seen = []
    for layer in layers:
        weights = stream.acquire(layer)
        time.sleep(compute_s)
        seen.append(int(weights["index"]))
        stream.release(layer)
    return seen


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("num_slots", [1, 2, 3])
@pytest.mark.parametrize(("load_s", "compute_s"), [(0.0, 0.0), (0.002, 0.0), (0.0, 0.002)])
def test_every_pass_sees_every_layer_whatever_is_slow(
    count: int, num_slots: int, load_s: float, compute_s: float
) -> None:
    with ring(count, num_slots, load_s=load_s, first=4) as (stream, memory):
        for _ in range(4):
            assert run_pass(stream, range(4, 4 + count), compute_s=compute_s) == list(range(4, 4 + count))
        assert not memory.overwritten


def test_the_first_layers_of_the_next_pass_load_between_passes() -> None:
    with ring(5, 3) as (stream, memory):
        run_pass(stream, range(5))
        time.sleep(0.1)
        assert memory.loaded == [0, 1, 2, 3, 4, 0, 1, 2]


def test_reading_ahead_is_bounded_by_the_slots() -> None:
    with ring(8, 2) as (stream, memory):
        time.sleep(0.05)
        assert memory.loaded == [0, 1]
        stream.acquire(0)
        time.sleep(0.05)
        assert memory.loaded == [0, 1], "the slot in use was loaded over"
        stream.release(0)
        time.sleep(0.05)
        assert memory.loaded == [0, 1, 2]


def test_an_error_comes_out_where_the_layer_is_asked_for_and_the_ring_goes_on() -> None:
    with ring(4, 2) as (stream, memory):
        memory.fail_on[2] = 1_000_000
        assert run_pass(stream, range(2)) == [0, 1]
        with pytest.raises(OSError, match="layer 2"):
            stream.acquire(2)
        memory.fail_on[2] = 0
        assert run_pass(stream, range(4)) == [0, 1, 2, 3]
        assert run_pass(stream, range(4)) == [0, 1, 2, 3]


def test_an_error_that_stays_is_met_again() -> None:
    with ring(3, 2) as (stream, memory):
        memory.fail_on[2] = 100  # not read ahead yet
        for _ in range(3):
            assert run_pass(stream, range(2)) == [0, 1]
            with pytest.raises(OSError, match="layer 2"):
                stream.acquire(2)


def test_an_error_met_while_reading_ahead_is_forgotten_once_mended() -> None:
    """The first layers are read between passes; what failed then is read again when it is asked for."""
    with ring(4, 2) as (stream, memory):
        run_pass(stream, range(2))
        memory.fail_on[0] = 1
        run_pass(stream, range(2, 4))
        time.sleep(0.05)
        assert memory.fail_on[0] == 0, "the fault was met while reading ahead"
        assert run_pass(stream, range(4)) == [0, 1, 2, 3]


@pytest.mark.parametrize("load_s", [0.0, 0.005])
@pytest.mark.parametrize("abandoned_at", [0, 1, 3])
def test_an_abandoned_pass_does_not_confuse_the_next(abandoned_at: int, load_s: float) -> None:
    """The forward raised between acquire and release, or between two layers."""
    with ring(5, 2, load_s=load_s) as (stream, memory):
        for held in (True, False):
            run_pass(stream, range(abandoned_at))
            if held:
                stream.acquire(abandoned_at)
                memory.in_use.clear()  # the forward that read it is gone
            assert run_pass(stream, range(5)) == [0, 1, 2, 3, 4]


def test_a_load_under_way_when_the_ring_is_wound_is_forgotten() -> None:
    with ring(5, 1, load_s=0.05) as (stream, memory):
        run_pass(stream, range(1))
        while memory.begun != [0, 1]:
            time.sleep(0.001)
        assert run_pass(stream, range(1)) == [0]
        assert memory.loaded[:3] == [0, 1, 0], "layers between were loaded for nobody"


def test_what_an_abandoned_pass_holds_is_taken_back() -> None:
    with ring(3, 1) as (stream, memory):
        stream.acquire(0)
        assert run_pass(stream, range(3)) == [0, 1, 2]
        assert not memory.overwritten


def test_close_ends_the_reader_and_whoever_waits_for_it() -> None:
    before = reader_threads()
    memory = SlotMemory(1, load_s=0.05)
    stream = LayerStream(records(2), memory, num_slots=1)
    stream.acquire(1)
    closer = threading.Timer(0.02, stream.close)
    closer.start()
    with pytest.raises(RuntimeError, match="closed"):
        stream.acquire(0)
    closer.join()
    assert reader_threads() <= before


def test_other_work_is_done_while_a_layer_is_not_there_and_no_longer() -> None:
    with ring(4, 2, load_s=0.02) as (stream, _):
        done: list[bool] = []

        def work() -> bool:
            done.append(True)
            time.sleep(0.001)
            return len(done) < 100

        stream.meanwhile, seen = work, list[int]()
        for layer in range(4):
            seen.append(int(stream.acquire(layer)["index"]))
            stream.release(layer)
        assert seen == [0, 1, 2, 3]
        assert len(done) > 8
        done.clear()
        time.sleep(0.1)  # the next two layers are there
        for layer in range(2):
            stream.acquire(layer)
            stream.release(layer)
        assert not done


def test_a_pass_waits_as_ever_once_there_is_no_other_work() -> None:
    with ring(3, 2, load_s=0.02) as (stream, _):
        asked: list[int] = []

        def work() -> bool:
            asked.append(1)
            return False

        stream.meanwhile = work
        assert run_pass(stream, range(3)) == [0, 1, 2]
        assert 1 <= len(asked) <= 3


def test_what_other_work_raises_leaves_the_ring_in_order() -> None:
    with ring(3, 2, load_s=0.02) as (stream, _):

        def work() -> bool:
            raise KeyboardInterrupt

        stream.meanwhile = work
        with pytest.raises(KeyboardInterrupt):
            stream.acquire(0)
        stream.meanwhile = None
        assert run_pass(stream, range(3)) == [0, 1, 2]
