"""Experts on a simulated device, which works in any order: what a real one does is in tests marked gpu.

Rows that ask for an expert compute with it when the device comes to it, which is when it is compared with its file.
"""

import functools
import itertools
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM

from offload.experts import on_demand as hooking
from offload.experts.cpu_experts import NUM_READERS
from offload.experts.cuda_experts import CudaExperts
from offload.experts.expert_cache import ExpertCache
from offload.experts.expert_group import ExpertGroup, ExpertWeights
from offload.experts.expert_source import ExpertSource
from offload.experts.expert_use import ExpertUse
from offload.layer_store import LayerStore
from profiles.in_place import HostRates
from tests.offload.experts.mixtures import on_demand, placement_of
from tests.offload.streaming import logits, skeleton_of
from tests.support.simulated_device import SimulatedDevice

NUM_LAYERS, NUM_EXPERTS = 3, 4
CHOICES = st.lists(st.integers(0, 8), min_size=1, max_size=50)
ASKED = st.lists(  # a layer, its experts that rows ask for, and how many of these are computed with
    st.tuples(
        st.integers(0, NUM_LAYERS - 1),
        st.sets(st.integers(0, NUM_EXPERTS - 1), min_size=1).map(sorted),
        st.integers(1, NUM_EXPERTS),
    ),
    min_size=1,
    max_size=8,
)
ALL_MOVE = HostRates(link_bytes_per_s=1e12, bytes_per_s=1.0, flops_per_s=1.0)


def rows_of(experts: list[int]) -> dict[int, int]:
    """One row asks for each."""
    return dict.fromkeys(experts, 1)


@functools.cache
def groups_of(folder: Path) -> tuple[ExpertGroup, ...]:
    """The experts of each layer, of which nothing changes: found once for all examples."""
    return skeleton_of(folder).expert_groups


def experts_of(
    folder: Path, device: SimulatedDevice, *, slots: int, pinned: int, use: ExpertUse | None = None
) -> tuple[tuple[ExpertGroup, ...], ExpertSource, CudaExperts]:
    groups = groups_of(folder)
    store = LayerStore({entry.file for group in groups for record in group.experts for entry in record.entries})
    memory = CudaExperts(
        store, groups, placement=placement_of(groups, slots=slots, pinned=pinned, use=use), num_scratch=1 << 16,
        dtype=torch.float32, device=device, rates=ALL_MOVE,
    )  # fmt: skip
    expert_bytes = groups[0].expert_flat_bytes
    cache = ExpertCache([expert_bytes] * NUM_LAYERS, num_experts=NUM_EXPERTS, capacity_bytes=slots * expert_bytes)
    return groups, ExpertSource(groups, cache, memory), memory


def experts_bytes(folder: Path, num_experts: int | None) -> int | None:
    return None if num_experts is None else num_experts * groups_of(folder)[0].expert_flat_bytes


@functools.cache
def stored_weights(folder: Path) -> dict[tuple[int, int], dict[str, Tensor]]:
    """What the files hold: (layer, expert) -> name -> all numbers in a row."""
    groups = groups_of(folder)
    store = LayerStore({entry.file for group in groups for record in group.experts for entry in record.entries})
    return {
        (row, expert): {
            name: torch.cat([piece.flatten() for piece in pieces]).float()
            for name, pieces in store.pieces(record).items()
        }
        for row, group in enumerate(groups)
        for expert, record in enumerate(group.experts)
    }


@pytest.mark.parametrize("pinned", [0, 5, 12], ids=["disk", "both", "locked"])
@pytest.mark.parametrize("num_locked", [None, NUM_READERS + 4], ids=["", "little"])
@settings(max_examples=40, deadline=None)
@given(choices=CHOICES, asked=ASKED, slots=st.sampled_from([1, 3, 12]))
def test_every_computation_reads_its_own_expert(
    num_locked: int | None,
    pinned: int,
    folder: Path,
    choices: list[int],
    asked: list[tuple[int, list[int], int]],
    slots: int,
) -> None:
    device = SimulatedDevice(choices, max_locked_bytes=experts_bytes(folder, num_locked))
    _, source, memory = experts_of(folder, device, slots=slots, pinned=pinned)
    assert memory.num_pinned == (pinned if num_locked is None else min(pinned, 4))
    expected = stored_weights(folder)

    def compute(row: int, expert: int, weights: ExpertWeights) -> None:
        for name, weight in weights.items():
            if not torch.equal(torch.cat(list(weight.blocks())).flatten(), expected[row, expert][name]):
                device.faults.append(f"expert {expert} of layer {row} was another one")

    for row, experts, num_computed in asked:
        handed_out = source.take(row, rows_of(experts))
        for expert in itertools.islice(handed_out, num_computed):
            device.current_stream().give(partial(compute, row, expert.number, expert.weights))
        handed_out.close()  # a pass may be given up between two experts
    source.close()
    assert not device.pinned
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("edgespec-experts")]
    device.finish()
    assert not device.faults


@given(choices=CHOICES)
@settings(max_examples=30, deadline=None)
def test_a_staging_buffer_is_filled_again_only_after_its_copy(folder: Path, choices: list[int]) -> None:
    device = SimulatedDevice(choices)
    _, source, memory = experts_of(folder, device, slots=12, pinned=0)
    while memory._staging.qsize() > 1:
        memory._staging.get_nowait()
    expected = stored_weights(folder)
    found = [(expert.number, expert.weights) for expert in source.take(0, rows_of([0, 1, 2, 3]))]
    device.finish()
    for expert, weights in found:
        for name, weight in weights.items():
            assert torch.equal(torch.cat(list(weight.blocks())).flatten(), expected[0, expert][name])
    source.close()


def test_the_experts_that_are_used_most_wait_in_locked_memory(folder: Path) -> None:
    use = ((0.1, 0.2, 0.9, 0.1), (0.5, 0.5, 0.4, 0.6), (0.0, 0.1, 0.0, 0.3))
    groups, source, memory = experts_of(folder, SimulatedDevice(is_eager=True), slots=2, pinned=4, use=use)
    layers = [group.layer for group in groups]
    assert sorted(memory._pinned) == [(layers[0], 2), *((layers[1], expert) for expert in (0, 1, 3))]
    expected = stored_weights(folder)
    for row in range(len(groups)):
        for expert in source.take(row, rows_of([0, 1, 2, 3])):
            for name, weight in expert.weights.items():
                assert torch.equal(torch.cat(list(weight.blocks())).flatten(), expected[row, expert.number][name])
    source.close()


@pytest.mark.parametrize(("num_locked", "num_pinned"), [(0, 0), (3, 0), (7, 0), (8, 4), (15, 8), (16, 12)])
def test_where_little_memory_can_be_locked_the_rest_is_read_from_its_files(
    num_locked: int, num_pinned: int, folder: Path
) -> None:
    """Staging comes first, then layer by layer."""
    device = SimulatedDevice(is_eager=True, max_locked_bytes=experts_bytes(folder, num_locked))
    groups, source, memory = experts_of(folder, device, slots=2, pinned=12)
    assert memory.num_pinned == num_pinned
    assert memory._staging.qsize() == (num_locked if 1 < num_locked < NUM_READERS else NUM_READERS)
    for row in range(len(groups)):
        assert sorted(expert.number for expert in source.take(row, rows_of([0, 1, 2, 3]))) == [0, 1, 2, 3]
    source.close()


def test_a_device_that_has_failed_leaves_no_locked_memory_and_no_threads(folder: Path) -> None:
    device = SimulatedDevice(is_eager=True)
    _, source, _ = experts_of(folder, device, slots=2, pinned=5)
    device.error = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal"):
        list(source.take(0, rows_of([0, 1])))
    with pytest.raises(RuntimeError, match="illegal"):
        source.close()
    assert not device.pinned
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("edgespec-experts")]


@pytest.mark.parametrize(("slots", "pinned"), [(1, 0), (3, 12), (12, 5)])
def test_a_model_computes_with_it(slots: int, pinned: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = skeleton_of(folder).expert_groups
    device = SimulatedDevice(is_eager=True)

    def on_device(store: LayerStore, *, num_scratch: int, dtype: torch.dtype, keeps_cached: bool) -> CudaExperts:
        return CudaExperts(
            store, groups, placement=placement_of(groups, slots=slots, pinned=pinned), num_scratch=num_scratch,
            dtype=dtype, device=device, rates=ALL_MOVE,
        )  # fmt: skip

    monkeypatch.setattr(hooking, "CpuExperts", on_device)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with on_demand(folder, room=slots) as model:
        for rows in (20, 1, 7, 1):
            assert torch.equal(logits(model.model, rows=rows), logits(reference, rows=rows))
