"""Placement: arithmetic over bytes."""

import itertools
from pathlib import Path

import pytest
import torch

from offload.checkpoint import TensorEntry
from offload.errors import PlacementError
from offload.layer_store import LayerRecord, StoredTensor
from offload.placement import (
    COPIES,
    MIN_SLOTS,
    NUM_SLOTS_CONVERTED,
    NUM_SLOTS_MAPPED,
    NUM_STAGING_BUFFERS,
    Placement,
    place_layers,
    with_pinned_layers,
)

LAYER = 1024  # bytes stored
COPIED = LAYER // 4


def make_records(count: int, *, compute: torch.dtype) -> list[LayerRecord]:
    entry = TensorEntry(name="w", dtype=torch.bfloat16, shape=(512,), file=Path("f"), offset=0, num_bytes=LAYER)
    tensors = {"w": StoredTensor(pieces=(entry,), shape=(512,), dtype=compute)}
    return [LayerRecord(index=index, tensors=tensors) for index in range(count)]


def place(budget: int, *, compute: torch.dtype = torch.bfloat16, accelerator: bool = False, pinned: int = 0,
          most: int | None = None) -> Placement:  # fmt: skip
    return place_layers(
        make_records(10, compute=compute),
        device_memory={"cache": 100},
        device_budget_bytes=budget,
        host_memory={"libraries": 0} if accelerator else None,
        host_budget_bytes=pinned,
        max_resident=most,
    )


def place_copied(budget: int) -> Placement:
    """Layers that are copied in a quarter of their bytes where they do not stay."""
    return place_layers(
        make_records(10, compute=torch.bfloat16),
        device_memory={"cache": 100},
        device_budget_bytes=budget,
        copy_bytes=[COPIED] * 10,
    )


def test_all_layers_are_resident_when_they_fit_and_no_stream_is_paid_for() -> None:
    placement = place(100 + 10 * LAYER)
    assert (placement.num_resident, placement.streamed_bytes) == (10, 0)
    assert placement.planned_bytes == 100 + 10 * LAYER


@pytest.mark.parametrize("budget", range(100 + MIN_SLOTS * LAYER + 10 * COPIED, 14 * LAYER, 700))
def test_a_layer_that_stays_frees_its_copy(budget: int) -> None:
    """By hand: the copies of the others, the stream where there are others, and as many layers as fit."""
    placement = place_copied(budget)
    streams = budget >= 100 + 10 * COPIED + NUM_SLOTS_MAPPED * LAYER
    slots = NUM_SLOTS_MAPPED if streams else MIN_SLOTS

    def needed(count: int) -> int:
        return 100 + count * LAYER + (10 - count) * COPIED + (slots * LAYER if count < 10 else 0)

    count = placement.num_resident
    assert placement.planned_bytes == needed(count) <= budget
    assert all(needed(more) > budget for more in range(count + 1, 11))
    assert placement.device_bytes[COPIES] == (10 - count) * COPIED


def test_copies_count_where_nothing_fits() -> None:
    with pytest.raises(PlacementError) as raised:
        place_copied(100 + MIN_SLOTS * LAYER + 10 * COPIED - 1)
    assert raised.value.needed_bytes == 100 + MIN_SLOTS * LAYER + 10 * COPIED


@pytest.mark.parametrize("spare_layers", range(10))
def test_as_many_layers_as_fit_beside_the_stream(spare_layers: int) -> None:
    placement = place(100 + (NUM_SLOTS_MAPPED + spare_layers) * LAYER)
    expected = 10 if NUM_SLOTS_MAPPED + spare_layers >= 10 else spare_layers
    assert placement.num_resident == expected
    assert placement.streamed_bytes == (10 - expected) * LAYER
    assert placement.planned_bytes <= placement.device_budget_bytes


def test_where_three_slots_do_not_fit_two_do() -> None:
    placement = place(100 + 2 * LAYER)
    assert placement.num_slots == 2
    assert placement.planned_bytes == 100 + 2 * LAYER
    assert place(100 + 3 * LAYER).num_slots == 3
    with pytest.raises(PlacementError):
        place(100 + 2 * LAYER - 1)


def test_converted_layers_count_at_their_size_in_memory() -> None:
    ring = NUM_SLOTS_CONVERTED * 2 * LAYER + LAYER
    placement = place(100 + ring + 3 * 2 * LAYER, compute=torch.float32)
    assert placement.num_resident == 3
    assert placement.streamed_bytes == 7 * LAYER


def test_a_wish_for_fewer_resident_layers_is_honoured() -> None:
    assert place(1 << 30, most=4).num_resident == 4
    assert place(1 << 30, most=0).num_resident == 0
    assert place(1 << 30, most=99).num_resident == 10


def test_on_an_accelerator_the_layers_of_all_three_tiers_are_spread_over_the_depth() -> None:
    placement = place(
        100 + NUM_SLOTS_CONVERTED * LAYER + 2 * LAYER, accelerator=True, pinned=(3 + NUM_STAGING_BUFFERS) * LAYER + 5
    )
    assert placement.resident_layers == {2, 7}
    assert placement.pinned_layers == {1, 5, 8}
    assert placement.num_on_disk == 5


@pytest.mark.parametrize("num_resident", range(11))
def test_resident_layers_are_as_far_from_each_other_as_can_be(num_resident: int) -> None:
    resident = sorted(place(1 << 30, most=num_resident).resident_layers)
    gaps = {after - before for before, after in itertools.pairwise(resident)}
    assert len(resident) == num_resident
    assert not gaps or max(gaps) - min(gaps) <= 1


def pass_s(placement: Placement, *, copy_s: float, disk_s: float, compute_s: float) -> float:
    """The seconds of a pass in the steady state, layer by layer, with a disk, a link and a device that work at once.

    The disk begins with its next layer once the one before is read, a copy begins once its slot was computed with.
    """
    disk, reader, link, device = 0.0, 0.0, 0.0, 0.0  # when each is done with what it was given
    announced, ends = 0.0, []
    slots = [0.0] * placement.num_slots
    position = 0
    for _ in range(10):
        for layer in range(placement.num_layers):
            if layer in placement.resident_layers:
                device += compute_s
                continue
            slot = position % len(slots)
            position += 1
            reader = max(reader, slots[slot])
            if layer not in placement.pinned_layers:
                disk = max(disk, announced) + disk_s
                reader = announced = max(reader, disk)
            link = max(link, reader) + copy_s
            device = slots[slot] = max(device, link) + compute_s
        ends.append(device)
    return (ends[-1] - ends[1]) / (len(ends) - 2)


@pytest.mark.parametrize("num_resident", [0, 7, 20, 33])
@pytest.mark.parametrize("num_pinned", [0, 5, 20, 40])
@pytest.mark.parametrize(("copy_s", "disk_s", "compute_s"), [(18, 100, 6), (18, 30, 11), (18, 60, 20), (18, 0, 3)])
def test_a_pass_takes_as_long_as_the_slowest_of_disk_link_and_device(
    num_resident: int, num_pinned: int, copy_s: float, disk_s: float, compute_s: float
) -> None:
    """Which is what estimates say; a placement whose tiers follow each other would take up to the sum of them."""
    placement = place_layers(
        make_records(40, compute=torch.bfloat16),
        device_memory={},
        device_budget_bytes=(num_resident + NUM_SLOTS_CONVERTED) * LAYER,
        host_memory={},
        host_budget_bytes=(num_pinned + NUM_STAGING_BUFFERS) * LAYER,
    )
    assert placement.num_resident == num_resident
    slowest_s = max((40 - num_resident) * copy_s, placement.num_on_disk * disk_s, 40 * compute_s)
    assert pass_s(placement, copy_s=copy_s, disk_s=disk_s, compute_s=compute_s) == pytest.approx(slowest_s, rel=0.03)


def test_too_little_memory_is_refused_with_the_table_and_what_is_missing() -> None:
    with pytest.raises(PlacementError) as caught:
        place(100)
    assert caught.value.code == "E_MEMORY"
    assert "cache" in caught.value.what
    assert "stream buffers" in caught.value.what
    assert "GiB more than the limit" in caught.value.what


def test_an_accelerators_plan_shows_both_memories_and_the_disk() -> None:
    placement = place(100 + NUM_SLOTS_CONVERTED * LAYER, accelerator=True, pinned=(4 + NUM_STAGING_BUFFERS) * LAYER)
    assert (placement.num_resident, placement.num_pinned, placement.num_on_disk) == (0, 4, 6)
    assert placement.disk_bytes == 6 * LAYER
    assert placement.streamed_bytes == 10 * LAYER
    assert sum(placement.host_bytes.values()) == (4 + NUM_STAGING_BUFFERS) * LAYER
    table = placement.table()
    assert "GPU   stream buffers" in table
    assert "RAM   4 layers, copied in each pass" in table
    assert "disk  6 layers, read in each pass" in table


@pytest.mark.parametrize(("room", "num_pinned"), [(0, 10), (1, 5), (4, 2), (100, 0)])
def test_room_that_is_left_for_the_system_is_not_locked(room: int, num_pinned: int) -> None:
    placement = place_layers(
        make_records(10, compute=torch.bfloat16), device_memory={}, device_budget_bytes=NUM_SLOTS_CONVERTED * LAYER,
        host_memory={}, host_budget_bytes=10 * LAYER, host_room_bytes=room * LAYER,
    )  # fmt: skip
    assert placement.num_pinned == num_pinned


def test_no_staging_is_paid_for_when_every_layer_waits_in_memory() -> None:
    placement = place(100 + NUM_SLOTS_CONVERTED * LAYER, accelerator=True, pinned=10 * LAYER)
    assert placement.num_on_disk == 0
    assert "staging buffers" not in placement.host_bytes


def test_staging_buffers_take_parts_of_large_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two more layers wait in the memory that whole ones would take."""
    monkeypatch.setattr("offload.placement.STAGING_BYTES", LAYER // 2)
    placement = place(100 + NUM_SLOTS_CONVERTED * LAYER, accelerator=True, pinned=(4 + NUM_STAGING_BUFFERS) * LAYER)
    assert placement.host_bytes["staging buffers"] == NUM_STAGING_BUFFERS * LAYER // 2
    assert placement.num_pinned == 4 + NUM_STAGING_BUFFERS // 2


@pytest.mark.parametrize("waiting", [10, 4])  # layers that the plan has in locked memory
@pytest.mark.parametrize("pinned", [{1, 6}, set()])
def test_layers_for_which_no_memory_could_be_locked_are_on_disk(waiting: int, pinned: set[int]) -> None:
    """What is left of the plan is the plan for as much memory as could be locked."""
    device_bytes = 100 + NUM_SLOTS_CONVERTED * LAYER
    planned = place(device_bytes, accelerator=True, pinned=(waiting + NUM_STAGING_BUFFERS * (waiting < 10)) * LAYER)
    assert planned.num_pinned == waiting
    records = make_records(10, compute=torch.bfloat16)
    assert with_pinned_layers(planned, records, planned.pinned_layers) is planned
    found = with_pinned_layers(planned, records, frozenset(pinned))
    expected = place(device_bytes, accelerator=True, pinned=(len(pinned) + NUM_STAGING_BUFFERS) * LAYER)
    assert (found.num_pinned, found.num_on_disk, found.disk_bytes) == (
        expected.num_pinned, expected.num_on_disk, expected.disk_bytes,
    )  # fmt: skip
    assert found.host_bytes == expected.host_bytes
    assert found.streamed_bytes == 10 * LAYER


def test_too_little_ram_beside_an_accelerator_is_refused_by_name() -> None:
    with pytest.raises(PlacementError, match="of RAM are needed"):
        place(100 + NUM_SLOTS_CONVERTED * LAYER, accelerator=True, pinned=LAYER)


def test_on_a_cpu_there_is_one_memory() -> None:
    placement = place(100 + NUM_SLOTS_MAPPED * LAYER)
    assert placement.host_bytes == {}
    assert "GPU" not in placement.table()
    assert placement.num_on_disk == 10
