"""The CUDA loader's bookkeeping, with a stand-in for the device: host tensors, and streams that log what they are told.

What a real device does with it is in the tests marked gpu, and in scripts/gpu_check.py.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from offload import pinned
from offload.checkpoint import read_checkpoint
from offload.layer_store import LayerRecord, LayerStore
from offload.loaders import CudaLoader
from offload.pinned import PinningError
from offload.placement import place_layers
from offload.skeleton import Skeleton, build_skeleton
from offload.streamed_model import StreamedModel

CPU = torch.device("cpu")
UNLIMITED = 1 << 40
Log = list[tuple[str, str, int]]  # what, on which stream, which event


class StandInStream:
    def __init__(self, log: Log, name: str) -> None:
        self.log, self.name = log, name

    def wait_event(self, event: StandInEvent) -> None:
        self.log.append(("wait", self.name, id(event)))

    def wait_stream(self, other: StandInStream) -> None:
        self.log.append(("wait for", self.name, id(other)))

    def synchronize(self) -> None:
        self.log.append(("synchronize", self.name, 0))


class StandInEvent:
    def __init__(self, log: Log) -> None:
        self.log = log

    def record(self, stream: StandInStream) -> None:
        self.log.append(("record", stream.name, id(self)))

    def synchronize(self) -> None:
        self.log.append(("wait", "reader", id(self)))

    def query(self) -> bool:
        return True


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    calls: Log = []
    compute = StandInStream(calls, "compute")

    @contextmanager
    def on(_stream: StandInStream) -> Iterator[None]:
        yield

    monkeypatch.setattr(torch.cuda, "Stream", lambda _device: StandInStream(calls, "copy"))
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking=False: StandInEvent(calls))
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: compute)
    monkeypatch.setattr(pinned, "register", lambda _data, _device: None)
    monkeypatch.setattr(pinned, "unregister", lambda _data: None)
    return calls


def skeleton_of(folder: Path) -> Skeleton:
    return build_skeleton(AutoConfig.from_pretrained(folder), read_checkpoint(folder), dtype=torch.bfloat16)


def make_loader(records: tuple[LayerRecord, ...], *, pinned_layers: set[int], num_slots: int = 2) -> CudaLoader:
    store = LayerStore({entry.file for record in records for entry in record.entries})
    return CudaLoader(store, records, num_slots=num_slots, pinned_layers=frozenset(pinned_layers), device=CPU)


@pytest.mark.parametrize("pinned_layers", [set(), {0, 1}, {0, 1, 2}], ids=["disk", "both", "pinned"])
def test_slots_hold_the_layers_that_were_loaded(
    pinned_layers: set[int], pair_folders: tuple[Path, Path], log: Log
) -> None:
    records = skeleton_of(pair_folders[0]).records
    loader = make_loader(records, pinned_layers=pinned_layers)
    store = LayerStore({entry.file for record in records for entry in record.entries})
    for position in range(7):
        record = records[position % len(records)]
        loader.load(record, position % 2)
        weights = loader.hand_out(record, position % 2)
        loader.take_back(record, position % 2)
        expected = store.views(record)
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], expected[name]) for name in weights)
    loader.close()
    assert log[-1] == ("synchronize", "copy", 0)


def test_a_copy_waits_for_the_slots_last_reader_and_compute_for_the_copy(
    pair_folders: tuple[Path, Path], log: Log
) -> None:
    records = skeleton_of(pair_folders[0]).records
    loader = make_loader(records, pinned_layers={0, 1, 2})
    loader.load(records[0], 0)
    loader.hand_out(records[0], 0)
    loader.take_back(records[0], 0)
    copied = next(event for what, stream, event in log if (what, stream) == ("record", "copy"))
    assert ("wait", "compute", copied) in log
    released = next(event for what, stream, event in log if (what, stream) == ("record", "compute"))
    log.clear()
    loader.load(records[2], 0)
    assert log[:2] == [("wait", "copy", released), ("record", "copy", copied)]


def test_a_staging_buffer_is_filled_again_only_after_its_copy(pair_folders: tuple[Path, Path], log: Log) -> None:
    records = skeleton_of(pair_folders[0]).records
    loader = make_loader(records, pinned_layers=set())
    staged = []
    for position in range(4):
        log.clear()
        loader.load(records[position % 3], position % 2)
        assert log[0][:2] == ("wait", "reader")
        assert log[-1] == ("record", "copy", log[0][2])  # the buffer's own event, after the copy
        staged.append(log[0][2])
    assert staged[0] != staged[1]
    assert staged[:2] == staged[2:]


@pytest.mark.parametrize("allowed", [0, 1, 2, 3, 4])
def test_where_little_memory_can_be_locked_the_rest_is_read_from_its_files(
    allowed: int, pair_folders: tuple[Path, Path], log: Log, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    locked = 0

    def register(_data: torch.Tensor, _device: torch.device) -> None:
        nonlocal locked
        if locked == allowed:
            raise PinningError("the limit on locked memory is reached")
        locked += 1

    monkeypatch.setattr(pinned, "register", register)
    records = skeleton_of(pair_folders[0]).records
    with caplog.at_level(logging.WARNING):
        loader = make_loader(records, pinned_layers={0, 1, 2})
    assert loader.num_pinned == min(allowed, 3)
    assert bool(caplog.records) == (allowed < 3)
    store = LayerStore({entry.file for record in records for entry in record.entries})
    for position in range(4):
        record = records[position % 3]
        loader.load(record, position % 2)
        weights = loader.hand_out(record, position % 2)
        assert all(torch.equal(weight, store.views(record)[name]) for name, weight in weights.items())


def test_what_was_locked_is_unlocked_when_loading_fails_half_way(
    pair_folders: tuple[Path, Path], log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked: list[int] = []
    monkeypatch.setattr(pinned, "register", lambda data, _device: locked.append(data.data_ptr()))
    monkeypatch.setattr(pinned, "unregister", lambda data: locked.remove(data.data_ptr()))
    populate = LayerStore.populate

    def interrupted(self: LayerStore, record: LayerRecord) -> None:
        if record.index == 1:
            raise KeyboardInterrupt
        populate(self, record)

    monkeypatch.setattr(LayerStore, "populate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_loader(skeleton_of(pair_folders[0]).records, pinned_layers={0, 1, 2})
    gc.collect()
    assert not locked


def test_half_a_staging_ring_is_given_back(
    pair_folders: tuple[Path, Path], log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked: list[int] = []

    def register(data: torch.Tensor, _device: torch.device) -> None:
        if locked:
            raise PinningError("the limit on locked memory is reached")
        locked.append(data.data_ptr())

    monkeypatch.setattr(pinned, "register", register)
    monkeypatch.setattr(pinned, "unregister", lambda data: locked.remove(data.data_ptr()))
    loader = make_loader(skeleton_of(pair_folders[0]).records, pinned_layers=set())
    assert not locked
    loader.close()


def test_a_model_streams_through_it(pair_folders: tuple[Path, Path], log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "offload.streamed_model.CpuLoader",
        lambda _store, records, num_slots: make_loader(records, pinned_layers={1}, num_slots=num_slots),
    )
    skeleton, plain = skeleton_of(pair_folders[0]), skeleton_of(pair_folders[0])
    resident = StreamedModel(
        plain, place_layers(plain.records, device_uses={}, device_budget_bytes=UNLIMITED), device=CPU
    )
    streamed = StreamedModel(
        skeleton,
        place_layers(skeleton.records, device_uses={}, device_budget_bytes=UNLIMITED, max_resident=0),
        device=CPU,
    )
    ids = torch.arange(9)[None]
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(streamed.model(ids).logits, resident.model(ids).logits)
    streamed.close()
    assert ("synchronize", "copy", 0) in log
