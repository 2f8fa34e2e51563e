"""Memory goes to dense parts first, of which a pass reads all; what is left goes to experts."""

import pytest

from offload.allocated import allocated_bytes
from offload.errors import PlacementError
from offload.experts.cpu_experts import NUM_READERS
from offload.experts.expert_placement import READ, place_on_demand, with_pinned_experts
from offload.placement import MIN_SLOTS, Placement
from offload.skeleton import Skeleton
from tests.offload.experts.mixtures import save_mixture
from tests.offload.streaming import skeleton_of

USED = 1000


@pytest.fixture(scope="module")
def skeleton(tmp_path_factory: pytest.TempPathFactory) -> Skeleton:
    return skeleton_of(save_mixture(tmp_path_factory.mktemp("mixture"), "glm4-moe"))


def place(
    skeleton: Skeleton, budget: int, *, most: int | None = None, host: int | None = None, room: int = 0
) -> Placement:
    return place_on_demand(
        skeleton.dense_records,
        skeleton.expert_groups,
        device_memory={"cache": USED},
        device_budget_bytes=budget,
        host_memory=None if host is None else {"libraries": 0},
        host_budget_bytes=host or 0,
        host_room_bytes=room,
        max_resident=most,
    )


def dense_bytes(skeleton: Skeleton) -> list[int]:
    return [record.cpu_bytes for record in skeleton.dense_records]


def test_dense_parts_and_experts_make_up_the_layers(skeleton: Skeleton) -> None:
    experts = sum(group.num_experts * group.expert_stored_bytes for group in skeleton.expert_groups)
    dense = sum(record.stored_bytes for record in skeleton.dense_records)
    assert dense + experts == sum(record.stored_bytes for record in skeleton.records)
    assert [group.layer for group in skeleton.expert_groups] == [1, 2]  # the first layer has none
    assert all(
        record.stored_bytes == group.expert_stored_bytes for group in skeleton.expert_groups for record in group.experts
    )


def test_all_that_is_left_beside_the_dense_parts_goes_to_experts(skeleton: Skeleton) -> None:
    """Where some are read, a quarter of those that would fit is on its way instead."""
    expert = skeleton.expert_groups[0].expert_stored_bytes
    for spare, kept in ((8, 6), (11, 9), (16, 16), (40, 16)):
        placement = place(skeleton, USED + sum(dense_bytes(skeleton)) + spare * expert)
        assert placement.num_resident == 3
        assert placement.experts.num_kept == kept
        assert placement.planned_bytes <= placement.device_budget_bytes
        assert placement.device_bytes.get(READ, 0) == (spare - kept if spare < 16 else 0) * expert
        assert placement.streamed_bytes == (16 - kept) * expert
        assert f"{kept} of 16 experts" in placement.table()
        assert not placement.is_resident


def test_where_little_is_left_one_expert_has_room(skeleton: Skeleton) -> None:
    """One expert always has room beside the stream of dense parts, or nothing has."""
    expert, dense = skeleton.expert_groups[0].expert_stored_bytes, max(dense_bytes(skeleton))
    converted = max(record.copied.stored_bytes for record in skeleton.dense_records)
    least = USED + MIN_SLOTS * dense + converted + expert
    assert place(skeleton, least, most=0).experts.num_kept == 1
    with pytest.raises(PlacementError, match="needed with every layer streamed"):
        place(skeleton, least - 1, most=0)


def test_a_limit_on_resident_layers_is_one_on_their_dense_parts(skeleton: Skeleton) -> None:
    placement = place(skeleton, 1 << 30, most=1)
    assert (placement.num_resident, placement.experts.num_kept) == (1, 16)
    assert placement.streamed_bytes == placement.disk_bytes > 0


def test_beside_an_accelerator_experts_wait_in_locked_memory(skeleton: Skeleton) -> None:
    expert = max(group.expert_flat_bytes for group in skeleton.expert_groups)
    dense = sum(allocated_bytes(record.flat_bytes) for record in skeleton.dense_records)
    slots = allocated_bytes(10 * expert)  # one allocation
    placement = place(skeleton, USED + dense + slots, host=(NUM_READERS + 7) * expert)
    assert (placement.experts.num_kept, placement.experts.num_pinned) == (10, 7)
    assert placement.streamed_bytes == 6 * expert
    with_room = place(skeleton, USED + dense + slots, host=(NUM_READERS + 7) * expert, room=3 * expert)
    assert with_room.experts.num_pinned == 4
    assert sum(placement.host_bytes.values()) <= placement.host_budget_bytes
    with pytest.raises(PlacementError, match="RAM"):
        place(skeleton, USED + dense + slots, host=NUM_READERS * expert - 1)


@pytest.mark.parametrize("pinned", [0, 3, 7])
def test_experts_for_which_no_memory_could_be_locked_are_on_disk(pinned: int, skeleton: Skeleton) -> None:
    """What is left of the plan is the plan for as much memory as could be locked."""
    expert = max(group.expert_flat_bytes for group in skeleton.expert_groups)
    device = USED + sum(record.flat_bytes for record in skeleton.dense_records) + 10 * expert
    planned = place(skeleton, device, host=(NUM_READERS + 7) * expert)
    expected = place(skeleton, device, host=(NUM_READERS + pinned) * expert)
    found = with_pinned_experts(planned, pinned)
    assert (found.experts, found.disk_bytes, found.host_bytes) == (
        expected.experts, expected.disk_bytes, expected.host_bytes,
    )  # fmt: skip
