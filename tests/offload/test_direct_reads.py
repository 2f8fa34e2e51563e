"""Reads past the page cache: the bytes are those of mapped pages, whatever the layout; faults are said alike."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offload import direct_reads
from offload.checkpoint import TensorEntry
from offload.device_slots import StagingBuffer
from offload.direct_reads import BLOCK_BYTES, DirectFiles, open_direct
from offload.errors import StreamError
from offload.layer_parts import parts_of
from offload.layer_store import ALIGNMENT_BYTES, LayerRecord, LayerStore, StoredTensor
from offload.pages import fresh_pages
from offload.placement import NUM_STAGING_BUFFERS
from offload.staging import StagingRing
from tests.support.simulated_device import SimulatedDevice

SIZES = st.lists(st.integers(1, 3 * BLOCK_BYTES), min_size=1, max_size=4)  # bytes of each piece of a tensor
GAPS = st.sampled_from([0, 0, 8, 300, 5 * BLOCK_BYTES])


def is_offered(folder: Path) -> bool:
    path = folder / "probe"
    path.write_bytes(bytes(BLOCK_BYTES))
    return open_direct([record_of(0, path, [[(0, 8)]])]) is not None


def record_of(
    index: int, path: Path, tensors: list[list[tuple[int, int]]], dtype: torch.dtype = torch.uint8
) -> LayerRecord:
    """A layer of tensors whose pieces lie at (offset, bytes)."""
    stored = {}
    for number, places in enumerate(tensors):
        pieces = tuple(
            TensorEntry(name=f"{number}.{at}", dtype=torch.uint8, shape=(size,), file=path, offset=at, num_bytes=size)
            for at, size in places
        )
        stored[str(number)] = StoredTensor(pieces=pieces, shape=(sum(size for _, size in places),), dtype=dtype)
    return LayerRecord(index=index, tensors=stored)


def write_random(path: Path, num_bytes: int) -> None:
    path.write_bytes(torch.randint(0, 256, (num_bytes,), dtype=torch.uint8).numpy().tobytes())


@settings(max_examples=40, deadline=None)
@given(
    tensors=st.lists(SIZES, min_size=1, max_size=4),
    gaps=st.lists(GAPS, min_size=16, max_size=16),
    blocks=st.integers(1, 3),
    part_bytes=st.sampled_from([ALIGNMENT_BYTES, BLOCK_BYTES, 1 << 20]),
)
def test_a_layer_of_any_layout_is_that_of_the_mapped_file(
    tensors: list[list[int]], gaps: list[int], blocks: int, part_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("files")
    if not is_offered(folder):
        pytest.skip("no direct reads here")
    places, at, spaces = [], 0, iter(gaps)
    for sizes in tensors:
        places.append([])
        for size in sizes:
            at += next(spaces)
            places[-1].append((at, size))
            at += size
    path = folder / "weights"
    write_random(path, at)
    record = record_of(0, path, places[::-1])  # not in the order of the file
    store = LayerStore([path])
    mapped, direct = (
        torch.zeros(record.flat_bytes, dtype=torch.uint8),
        torch.zeros(record.flat_bytes, dtype=torch.uint8),
    )
    store.populate(record)
    store.copy(record, mapped)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct_reads, "READ_BYTES", blocks * BLOCK_BYTES)
        files = open_direct([record])
        assert files is not None
        for part in parts_of(record, part_bytes):
            files.read(part, direct[part.start : part.end])
        files.close()
    assert torch.equal(direct, mapped)


@pytest.fixture
def layers(tmp_path: Path) -> list[LayerRecord]:
    if not is_offered(tmp_path):
        pytest.skip("no direct reads here")
    write_random(tmp_path / "weights", 3 * 5000)
    return [record_of(index, tmp_path / "weights", [[(5000 * index, 5000)]]) for index in range(3)]


def ring_of(
    layers: list[LayerRecord], direct: list[LayerRecord], *, part_bytes: int | None = None
) -> tuple[StagingRing, LayerStore]:
    """By default each layer is one part."""
    device = SimulatedDevice(is_eager=True)
    buffers = [
        StagingBuffer(fresh_pages(part_bytes or layers[0].flat_bytes), device.new_event())
        for _ in range(NUM_STAGING_BUFFERS)
    ]
    store = LayerStore({entry.file for record in layers for entry in record.entries})
    return StagingRing(store, layers, buffers, direct=direct), store


def brought(ring: StagingRing, record: LayerRecord) -> Tensor:
    """The layer in one piece; whatever is read meanwhile is in no buffer whose copy may be under way."""
    whole = torch.zeros(record.flat_bytes, dtype=torch.uint8)
    for part, buffer in ring.parts(record):
        for ahead in ring._ahead:
            ahead.read.result()
        whole[part.start : part.end] = buffer.bytes[: part.end - part.start]
    return whole


@pytest.mark.parametrize("num_direct", [0, 1, 3])
@pytest.mark.parametrize("part_bytes", [None, 1024, 5 * ALIGNMENT_BYTES])
def test_layers_come_as_they_are_asked_for_also_where_the_ring_is_wound(
    num_direct: int, part_bytes: int | None, layers: list[LayerRecord]
) -> None:
    ring, store = ring_of(layers, layers[:num_direct], part_bytes=part_bytes)
    for asked in (0, 1, 2, 0, 2, 2, 1, 1, 0):
        assert torch.equal(brought(ring, layers[asked])[:5000], store.views(layers[asked])["0"])
    ring.close()


def test_a_layer_that_was_left_half_way_comes_again_from_its_beginning(layers: list[LayerRecord]) -> None:
    ring, store = ring_of(layers, layers, part_bytes=1024)
    for asked in (0, 1):
        next(ring.parts(layers[asked]))
    assert torch.equal(brought(ring, layers[1])[:5000], store.views(layers[1])["0"])
    ring.close()


@pytest.mark.parametrize("num_direct", [0, 3])
def test_the_disk_goes_on_with_the_next_layer_also_where_it_was_to_be_locked(
    num_direct: int, layers: list[LayerRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next parts are read while this one is copied, of this layer and of the one after it."""
    ring, _ = ring_of(layers, layers[:num_direct], part_bytes=2560)
    parts = ring.parts(layers[0])
    next(parts)
    for ahead in ring._ahead:
        ahead.read.result()
    assert [(ahead.part.record.index, ahead.part.start) for ahead in ring._ahead] == [(0, 2560), (1, 0), (1, 2560)]
    assert len(list(parts)) == 1
    assert len(ring._ahead) == NUM_STAGING_BUFFERS
    ring.close()


def test_closing_waits_for_the_layers_that_are_being_read(
    layers: list[LayerRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The buffers' memory is about to be another's."""
    ring, _ = ring_of(layers, layers)
    read = DirectFiles.read

    def slow(*arguments: Any) -> None:
        time.sleep(0.05)
        read(*arguments)

    monkeypatch.setattr(DirectFiles, "read", slow)
    next(ring.parts(layers[0]))
    ring.close()
    assert ring._ahead
    assert all(ahead.read.done() for ahead in ring._ahead)


def test_closing_waits_for_the_other_parts_of_a_layer_that_could_not_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A closed file's number is the next opened file's."""
    if not is_offered(tmp_path):
        pytest.skip("no direct reads here")
    monkeypatch.setattr(direct_reads, "READ_BYTES", BLOCK_BYTES)
    write_random(tmp_path / "weights", 3 * BLOCK_BYTES)
    record = record_of(0, tmp_path / "weights", [[(0, 3 * BLOCK_BYTES)]])
    files = open_direct([record])
    assert files is not None
    read, counts = os.preadv, []

    def first_fails(file: int, buffers: Any, offset: int) -> int:
        if offset == 0:
            raise OSError(5, "Input/output error")
        time.sleep(0.05)
        counts.append(read(file, buffers, offset))
        return counts[-1]

    monkeypatch.setattr(os, "preadv", first_fails)
    with pytest.raises(OSError, match="Input/output"):
        files.read(*parts_of(record, record.flat_bytes), torch.zeros(record.flat_bytes, dtype=torch.uint8))
    files.close()
    assert counts == [BLOCK_BYTES, BLOCK_BYTES]


def test_what_is_computed_in_another_type_comes_by_mapped_pages(layers: list[LayerRecord]) -> None:
    converted = record_of(0, layers[0].entries[0].file, [[(0, 5000)]], dtype=torch.float32)
    ring, store = ring_of([converted], [converted])
    found = brought(ring, converted)[: 4 * 5000].view(torch.float32)
    assert torch.equal(found, store.view(converted.entries[0]).float())
    ring.close()


@pytest.mark.parametrize("refuses", ["open", "read", "system"])
def test_where_they_are_not_offered_pages_are_mapped(
    refuses: str, layers: list[LayerRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: Any) -> None:
        raise OSError(22, "Invalid argument")

    if refuses == "system":
        monkeypatch.delattr(os, "O_DIRECT")
    else:
        monkeypatch.setattr(os, {"open": "open", "read": "preadv"}[refuses], refuse)
    ring, store = ring_of(layers, layers)
    for layer in layers:
        assert torch.equal(brought(ring, layer)[:5000], store.views(layer)["0"])
    ring.close()


def test_a_file_that_shrinks_or_is_written_over_is_named(layers: list[LayerRecord]) -> None:
    path = layers[0].entries[0].file
    ring, _ = ring_of(layers, layers, part_bytes=2560)
    for layer in layers:
        brought(ring, layer)
    content = path.read_bytes()
    first = 5000 + 2500  # of the bytes in the middle of layer 1, most of which are in its first part
    path.write_bytes(content[:first] + bytes(10) + content[first + 10 :])
    with pytest.raises(StreamError) as changed:
        brought(ring, layers[1])
    assert (changed.value.code, "weights" in changed.value.what) == ("E_FILE_CHANGED", True)
    os.truncate(path, 5000 + BLOCK_BYTES)
    with pytest.raises(StreamError) as shrunk:
        brought(ring, layers[1])
    assert (shrunk.value.code, "has shrunk" in shrunk.value.what) == ("E_READ_FAILED", True)
    path.write_bytes(content)
    assert brought(ring, layers[2])[0] == content[10000]  # and is read again
    ring.close()
