"""Plans count what an allocator rounds: whatever they place fits into their bytes."""

from pathlib import Path

import pytest
import torch

from offload.allocated import LARGE_BUFFER_BYTES, MIB, allocated_bytes
from offload.checkpoint import TensorEntry
from offload.experts.expert_placement import place_on_demand
from offload.layer_store import LayerRecord, StoredTensor
from offload.placement import place_layers
from tests.offload.experts.mixtures import save_mixture
from tests.offload.streaming import skeleton_of
from tests.support.allocator import RoundingAllocator

SIZES = [0.01, 0.6, 1.5, 6.1, 9.5, 10, 12.61, 400]  # MiB


def layer_of(index: int, num_bytes: int) -> LayerRecord:
    entry = TensorEntry(name="w", dtype=torch.uint8, shape=(num_bytes,), file=Path("f"), offset=0, num_bytes=num_bytes)
    return LayerRecord(index=index, tensors={"w": StoredTensor(pieces=(entry,), shape=(num_bytes,), dtype=torch.uint8)})


@pytest.mark.parametrize("size", SIZES)
def test_many_blocks_take_their_share_of_buffers(size: float) -> None:
    allocator = RoundingAllocator()
    for _ in range(100):
        allocator.take(int(size * MIB))
    counted_bytes = 100 * allocated_bytes(int(size * MIB))
    assert counted_bytes <= allocator.reserved_bytes <= counted_bytes + LARGE_BUFFER_BYTES


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_layers_there", [1, 30, 100])
def test_layers_fit_the_plans_bytes(size: float, num_layers_there: int) -> None:
    """But for the last buffer, which others find half empty."""
    records = [layer_of(index, int(size * MIB)) for index in range(100)]
    budget_bytes = int((num_layers_there + 2) * size * MIB) + LARGE_BUFFER_BYTES
    placement = place_layers(
        records, device_memory={}, device_budget_bytes=budget_bytes, host_memory={}, host_budget_bytes=1 << 40
    )
    allocator = RoundingAllocator(budget_bytes + LARGE_BUFFER_BYTES)
    for layer in placement.resident_layers:
        allocator.take(records[layer].flat_bytes)
    if not placement.is_resident:
        allocator.take(placement.num_slots * records[0].flat_bytes)
    assert allocator.reserved_bytes <= placement.planned_bytes + LARGE_BUFFER_BYTES
    assert placement.num_resident >= 0.7 * num_layers_there


@pytest.mark.parametrize("num_left", [9, 10, 11])
def test_slots_of_experts_fit_what_is_left(num_left: int, tmp_path: Path) -> None:
    """They are one allocation, which is rounded up."""
    skeleton = skeleton_of(save_mixture(tmp_path / "mixture", "qwen3-moe"))
    expert_bytes = max(group.expert_flat_bytes for group in skeleton.expert_groups)
    dense_bytes = sum(allocated_bytes(record.flat_bytes) for record in skeleton.dense_records)
    budget_bytes = dense_bytes + num_left * expert_bytes
    placement = place_on_demand(
        skeleton.dense_records, skeleton.expert_groups, device_memory={}, host_memory={}, host_budget_bytes=1 << 40,
        device_budget_bytes=budget_bytes,
    )  # fmt: skip
    assert placement.num_resident == placement.num_layers
    assert dense_bytes + allocated_bytes(placement.experts.kept_bytes) <= budget_bytes
    assert placement.experts.num_kept >= num_left - 1
