"""The CUDA loader's bookkeeping, on a simulated device.

The order of its work is in `test_device_order.py`; what a real device does with it is in the tests marked gpu, and in
scripts/gpu_check.py.
"""

import gc
import logging
import mmap
import re
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from offload import pinned, placement
from offload.device_slots import DeviceSlots
from offload.direct_reads import open_direct
from offload.layer_store import ALIGNMENT_BYTES, LayerRecord, LayerStore
from offload.loaders import CudaLoader
from offload.pages import fresh_pages
from offload.pinned import PinnedBuffer
from offload.placement import NUM_STAGING_BUFFERS
from offload.streamed_model import StreamedModel
from tests.offload.streaming import CPU, skeleton_of, unlimited_placement
from tests.support.allocator import RoundingAllocator
from tests.support.simulated_device import SimulatedDevice


def make_loader(
    records: tuple[LayerRecord, ...], device: SimulatedDevice, *, pinned_layers: set[int], num_slots: int = 2
) -> CudaLoader:
    store = LayerStore({entry.file for record in records for entry in record.entries})
    return CudaLoader(store, records, num_slots=num_slots, pinned_layers=frozenset(pinned_layers), device=device)


@pytest.mark.parametrize("pinned_layers", [set(), {0, 1}, {0, 1, 2}], ids=["disk", "both", "pinned"])
def test_slots_hold_the_layers_that_were_loaded(pinned_layers: set[int], pair_folders: tuple[Path, Path]) -> None:
    records = skeleton_of(pair_folders[0], torch.bfloat16).records
    loader = make_loader(records, SimulatedDevice(is_eager=True), pinned_layers=pinned_layers)
    store = LayerStore({entry.file for record in records for entry in record.entries})
    for position in range(7):
        record = records[position % len(records)]
        loader.load(record, position % 2)
        weights = loader.acquire(record, position % 2)
        loader.release(record, position % 2)
        expected = store.views(record)
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], expected[name]) for name in weights)
    loader.close()


@pytest.mark.parametrize(
    ("layers", "num_pinned", "num_staging"), [(0, 0, 0), (0.5, 0, 2), (1, 0, 4), (2, 1, 4), (3.9, 2, 4), (4, 3, 0)]
)
def test_where_little_memory_can_be_locked_staging_comes_first_and_the_rest_is_read_from_its_files(
    layers: float,
    num_pinned: int,
    num_staging: int,
    pair_folders: tuple[Path, Path],
    caplog: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Here a layer is as large as the staging ring: four parts of it."""
    records = skeleton_of(pair_folders[0], torch.bfloat16).records
    layer_bytes = records[0].flat_bytes
    part_bytes = -(-layer_bytes // 4 // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    monkeypatch.setattr(placement, "STAGING_BYTES", part_bytes)
    device = SimulatedDevice(is_eager=True, max_locked_bytes=int(layers * 4 * part_bytes))
    timed, measure = [], pinned.copy_seconds

    def copy_seconds(*arguments: Any) -> tuple[float, float]:
        timed.append(measure(*arguments))
        return 1.0, 4.0

    monkeypatch.setattr(pinned, "copy_seconds", copy_seconds)
    monkeypatch.setattr(pinned, "TIMED_BYTES", layer_bytes)
    with caplog.at_level(logging.WARNING):
        loader = make_loader(records, device, pinned_layers={0, 1, 2})
    assert len(loader.pinned_layers) == num_pinned
    assert sorted(device.pinned.values()) == [part_bytes] * num_staging + [layer_bytes] * num_pinned
    assert bool(loader._staging._buffers) == (num_pinned < 3), "what is not used is let go"
    assert bool(caplog.records) == (num_pinned < 3)
    left = 3 - num_pinned
    costs = f"takes {4 * left} s or more, which would be {left} s if locked" if num_staging else "edgespec doctor says"
    assert not left or costs in caplog.text
    assert len(timed) == bool(num_staging)
    store = LayerStore({entry.file for record in records for entry in record.entries})
    for position in range(4):
        record = records[position % 3]
        loader.load(record, position % 2)
        weights = loader.acquire(record, position % 2)
        assert all(torch.equal(weight, store.views(record)[name]) for name, weight in weights.items())


def test_layers_that_were_to_be_in_memory_come_by_the_page_cache(pair_folders: tuple[Path, Path]) -> None:
    """There is memory for them, though none that can be locked: the page cache has it. Others are read past it."""
    records = skeleton_of(pair_folders[0], torch.bfloat16).records
    assert all(record.is_stored_as_computed for record in records)
    if open_direct(records) is None:
        pytest.skip("no direct reads here")
    max_locked_bytes = (NUM_STAGING_BUFFERS + 1) * records[0].flat_bytes
    loader = make_loader(
        records, SimulatedDevice(is_eager=True, max_locked_bytes=max_locked_bytes), pinned_layers={1, 2}
    )
    assert len(loader.pinned_layers) == 1
    assert loader._staging._direct == {0}
    loader.load(records[2], 0)
    assert [ahead.part.record.index for ahead in loader._staging._ahead] == [0, 2, 0, 2]  # the disk goes on
    loader.close()


def test_all_slots_are_one_allocation() -> None:
    """An allocator rounds each one up: here from 12 MiB and a bit to 14."""
    device = SimulatedDevice(is_eager=True, allocator=RoundingAllocator(38 << 20))
    slots = DeviceSlots(device, num_slots=3, slot_bytes=(12 << 20) + ALIGNMENT_BYTES)
    assert [slots.acquire(slot).numel() for slot in range(slots.count)] == [(12 << 20) + ALIGNMENT_BYTES] * 3


def test_a_device_that_has_failed_leaves_no_locked_memory_and_no_threads(pair_folders: tuple[Path, Path]) -> None:
    """Every call raises the error of the kernel that failed, also those that wait at the end."""
    before = threading.active_count()
    records = skeleton_of(pair_folders[0], torch.bfloat16).records
    device = SimulatedDevice(is_eager=True)
    loader = make_loader(records, device, pinned_layers={1})
    loader.load(records[0], 0)
    device.error = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal"):
        loader.load(records[1], 1)
    with pytest.raises(RuntimeError, match="illegal"):
        loader.close()
    assert not device.pinned
    assert threading.active_count() == before


def test_what_was_locked_is_unlocked_when_loading_fails_half_way(
    pair_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimulatedDevice()
    populate = LayerStore.populate

    def interrupted(self: LayerStore, record: LayerRecord) -> None:
        if record.index == 1:
            assert device.pinned
            raise KeyboardInterrupt
        populate(self, record)

    monkeypatch.setattr(LayerStore, "populate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_loader(skeleton_of(pair_folders[0], torch.bfloat16).records, device, pinned_layers={0, 1, 2})
    gc.collect()
    assert not device.pinned


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere pages come when they are touched")
@pytest.mark.parametrize("num_bytes", [1, mmap.PAGESIZE, 8 * mmap.PAGESIZE + 1, (64 << 20) + 5])
def test_memory_is_there_before_it_is_locked(num_bytes: int) -> None:
    gc.collect()  # nothing else gives memory back meanwhile
    before_bytes = psutil.Process().memory_info().rss
    buffer = PinnedBuffer(num_bytes, device=SimulatedDevice())
    grown_bytes = psutil.Process().memory_info().rss - before_bytes
    assert buffer.bytes.numel() == num_bytes
    assert grown_bytes > num_bytes - (4 << 20)
    assert not buffer.bytes.any()
    buffer.close()


def test_a_single_staging_buffer_is_given_back(pair_folders: tuple[Path, Path]) -> None:
    records = skeleton_of(pair_folders[0], torch.bfloat16).records
    device = SimulatedDevice(max_locked_bytes=records[0].flat_bytes)
    loader = make_loader(records, device, pinned_layers=set())
    assert not device.pinned
    loader.close()


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux tells")
def test_locked_memory_is_in_large_pages_where_there_are_some() -> None:
    """A driver locks page by page, and each takes as long."""
    if "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="ascii"):
        pytest.skip("no large pages here")
    memory = fresh_pages(32 << 20)
    smaps = Path("/proc/self/smaps").read_text(encoding="ascii")
    of = re.search(rf"^{memory.data_ptr():x}-.*?AnonHugePages: +(\d+) kB", smaps, re.DOTALL | re.MULTILINE)
    assert int(of[1]) >= 16 << 10


def test_a_model_streams_through_it(pair_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimulatedDevice(is_eager=True)
    monkeypatch.setattr(
        "offload.streamed_model.CpuLoader",
        lambda _store, records, num_slots, keeps_cached: make_loader(
            records, device, pinned_layers={1}, num_slots=num_slots
        ),
    )
    skeleton, plain = (skeleton_of(pair_folders[0], torch.bfloat16) for _ in range(2))
    resident = StreamedModel(plain, unlimited_placement(plain), device=CPU)
    streamed = StreamedModel(skeleton, unlimited_placement(skeleton, resident=0), device=CPU)
    ids = torch.arange(9)[None]
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(streamed.model(ids).logits, resident.model(ids).logits)
    assert device.pinned
    streamed.close()
    assert not device.pinned
