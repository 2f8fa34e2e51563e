"""Loading and computing in any order that a device may choose: whatever a computation reads is its own layer.

A computation compares its slot, when the device comes to it, with what the layer's file holds. So a wait that is
missing anywhere is a wrong comparison for some of the orders that hypothesis chooses.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offload import device_slots, placement
from offload.checkpoint import TensorEntry
from offload.layer_store import ALIGNMENT_BYTES, LayerRecord, LayerStore, StoredTensor
from offload.loaders import CudaLoader
from offload.placement import NUM_STAGING_BUFFERS
from offload.stream import LayerStream
from tests.offload.streaming import reader_threads
from tests.support.simulated_device import SimulatedDevice, SimulatedStream

NUM_LAYERS = 5
LAYER_BYTES = 512
TIERS = {"locked": range(NUM_LAYERS), "staged": (), "mixed": (0, 3), "little locked": range(NUM_LAYERS)}
MAX_LOCKED_BYTES = {"little locked": (NUM_STAGING_BUFFERS + 1) * LAYER_BYTES}
CHOICES = st.lists(st.integers(0, 8), min_size=1, max_size=50)

Weights = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """A pass over the layers, which may be abandoned at one of them."""

    num_texts: int  # that read a layer one after the other
    abandoned_at: int | None  # a layer
    is_held: bool  # whether that layer was not given back either


PASSES = st.lists(
    st.builds(
        Pass,
        num_texts=st.integers(1, 3),
        abandoned_at=st.none() | st.integers(0, NUM_LAYERS - 1),
        is_held=st.booleans(),
    ),
    min_size=1,
    max_size=4,
)


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> list[LayerRecord]:
    """Layers of one tensor each, in one file; no two are alike."""
    file = tmp_path_factory.mktemp("layers") / "weights"
    content = torch.randint(0, 256, (NUM_LAYERS * LAYER_BYTES,), dtype=torch.uint8)
    file.write_bytes(content.numpy().tobytes())
    return [LayerRecord(index=layer, tensors={"w": stored(file, layer)}) for layer in range(NUM_LAYERS)]


def stored(file: Path, layer: int) -> StoredTensor:
    entry = TensorEntry(
        name=f"{layer}.w", dtype=torch.uint8, shape=(LAYER_BYTES,), file=file,
        offset=layer * LAYER_BYTES, num_bytes=LAYER_BYTES,
    )  # fmt: skip
    return StoredTensor(pieces=(entry,), shape=(LAYER_BYTES,), dtype=torch.uint8)


class Computation:
    """Layers computed with on a device: each compares the weights that it was handed, when its turn comes."""

    def __init__(self, records: list[LayerRecord], device: SimulatedDevice, *, tier: str, num_slots: int) -> None:
        self.store = LayerStore({entry.file for record in records for entry in record.entries})
        self.expected = {record.index: self.store.views(record)["w"] for record in records}
        self.device = device
        self.loader = CudaLoader(
            self.store, records, num_slots=num_slots, pinned_layers=frozenset(TIERS[tier]), device=device
        )

    def give(self, layer: int, weights: Weights) -> None:
        def read() -> None:
            if not torch.equal(weights["w"], self.expected[layer]):
                self.device.faults.append(f"layer {layer} was another one")

        self.device.current_stream().give(read)


def run_pass(stream: LayerStream, computation: Computation, one: Pass, *, reader_is_fast: bool) -> None:
    for layer in range(NUM_LAYERS):
        if reader_is_fast:
            wait_for_reader(stream)
        weights = stream.acquire(layer)
        for _ in range(one.num_texts):
            computation.give(layer, weights)
        if one.abandoned_at == layer and one.is_held:
            return
        stream.release(layer)
        if one.abandoned_at == layer:
            return


def wait_for_reader(stream: LayerStream) -> None:
    """Let the reader get as far ahead as it may."""
    while stream._thread.is_alive() and stream._next_load - stream._first_held < stream._num_slots:
        time.sleep(0)


@pytest.mark.parametrize("tier", TIERS)
@settings(max_examples=60, deadline=None)
@given(choices=CHOICES, passes=PASSES, num_slots=st.integers(1, 3), reader_is_fast=st.booleans())
def test_every_computation_reads_its_own_layer(
    tier: str, records: list[LayerRecord], choices: list[int], passes: list[Pass], num_slots: int, reader_is_fast: bool
) -> None:
    device = SimulatedDevice(choices, max_locked_bytes=MAX_LOCKED_BYTES.get(tier))
    computation = Computation(records, device, tier=tier, num_slots=num_slots)
    stream = LayerStream(records, computation.loader, num_slots=num_slots)
    for one in passes:
        run_pass(stream, computation, one, reader_is_fast=reader_is_fast)
    if reader_is_fast:
        wait_for_reader(stream)
    stream.close()
    assert not device.pinned
    device.finish()
    assert not device.faults


@pytest.mark.parametrize("tier", TIERS)
def test_copies_in_chunks_are_one_copy(tier: str, records: list[LayerRecord], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_slots, "CHUNK_BYTES", 100)
    device = SimulatedDevice([1, 2], max_locked_bytes=MAX_LOCKED_BYTES.get(tier))
    copy, sizes = device.copy, set()

    def noted(source: Tensor, destination: Tensor, stream: SimulatedStream) -> None:
        sizes.add(source.numel())
        copy(source, destination, stream)

    computation = Computation(records, device, tier=tier, num_slots=2)
    monkeypatch.setattr(device, "copy", noted)  # behind the copies that are timed where little is locked
    stream = LayerStream(records, computation.loader, num_slots=2)
    for _ in range(3):
        run_pass(stream, computation, Pass(num_texts=1, abandoned_at=None, is_held=False), reader_is_fast=True)
    stream.close()
    device.finish()
    assert not device.faults
    assert sizes == {100, LAYER_BYTES % 100}


@pytest.mark.parametrize("tier", ["staged", "mixed"])
@settings(max_examples=30, deadline=None)
@given(choices=CHOICES, reader_is_fast=st.booleans())
def test_layers_come_in_parts(tier: str, records: list[LayerRecord], choices: list[int], reader_is_fast: bool) -> None:
    """A part's buffer is filled again only after its copy, and a layer is there with its last part."""
    device = SimulatedDevice(choices)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement, "STAGING_BYTES", ALIGNMENT_BYTES)
        computation = Computation(records, device, tier=tier, num_slots=2)
    assert len(computation.loader._staging._parts[1]) == 2
    stream = LayerStream(records, computation.loader, num_slots=2)
    for abandoned_at in (None, 2, None):
        run_pass(stream, computation, Pass(num_texts=1, abandoned_at=abandoned_at, is_held=False),
                 reader_is_fast=reader_is_fast)  # fmt: skip
    stream.close()
    device.finish()
    assert not device.faults


@given(choices=CHOICES)
@settings(max_examples=30, deadline=None)
def test_slots_are_not_filled_while_their_memory_is_still_read_for_another(
    records: list[LayerRecord], choices: list[int]
) -> None:
    """An allocator hands memory out again as soon as it is let go, which is safe on the same stream alone."""
    device = SimulatedDevice(choices)
    memory = device.empty(LAYER_BYTES)
    was_intact = []
    device.current_stream().give(lambda: was_intact.append(not memory.any()))
    device.let_go(memory)
    computation = Computation(records, device, tier="locked", num_slots=1)
    computation.loader.load(records[0], 0)
    device.finish()
    computation.loader.close()
    assert was_intact == [True]


def test_what_an_abandoned_computation_reads_is_not_loaded_over(records: list[LayerRecord]) -> None:
    """Nobody wants its result, but a kernel that reads half of one layer and half of another may not end."""
    device = SimulatedDevice([2])  # the copies first
    computation = Computation(records, device, tier="locked", num_slots=1)
    stream = LayerStream(records, computation.loader, num_slots=1)
    run_pass(stream, computation, Pass(num_texts=1, abandoned_at=0, is_held=True), reader_is_fast=True)
    stream.acquire(2)
    stream.close()
    device.finish()
    assert not device.faults


def test_where_few_layers_can_be_locked_others_lie_between_them(records: list[LayerRecord]) -> None:
    device = SimulatedDevice(max_locked_bytes=(NUM_STAGING_BUFFERS + 2) * LAYER_BYTES)
    computation = Computation(records, device, tier="locked", num_slots=1)
    assert computation.loader.pinned_layers == {0, 2}
    computation.loader.close()


def test_nothing_is_loaded_once_the_stream_is_closed(records: list[LayerRecord]) -> None:
    before = reader_threads()
    computation = Computation(records, SimulatedDevice(), tier="staged", num_slots=3)
    LayerStream(records, computation.loader, num_slots=3).close()
    assert reader_threads() <= before
