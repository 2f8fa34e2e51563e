"""The bookkeeping of experts on a device, with a stand-in for it: what a real one does is in tests marked gpu."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from offload import pinned
from offload.experts import on_demand as hooking
from offload.experts.cuda_experts import CudaExperts
from offload.experts.expert_cache import ExpertCache
from offload.experts.expert_group import ExpertGroup
from offload.experts.expert_source import ExpertSource
from offload.layer_store import LayerStore
from offload.pinned import PinningError
from profiles.in_place import HostRates
from tests.offload.experts.mixtures import CPU, logits, on_demand, save_mixture, skeleton_of
from tests.offload.test_cuda_loader import Log, log

__all__ = ["log"]  # the stand-in, a fixture

Make = Callable[[int, int], ExpertSource]
ALL_MOVE = HostRates(link_bytes_per_s=1e12, bytes_per_s=1.0, flops_per_s=1.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mixture(tmp_path_factory.mktemp("mixture"), "qwen3-moe")


def rows_of(experts: list[int]) -> dict[int, int]:
    """One row asks for each."""
    return dict.fromkeys(experts, 1)


def experts_of(folder: Path, *, slots: int, locked: int) -> tuple[tuple[ExpertGroup, ...], ExpertSource, CudaExperts]:
    groups = skeleton_of(folder).experts
    store = LayerStore({entry.file for group in groups for record in group.experts for entry in record.entries})
    memory = CudaExperts(
        store, groups, num_slots=slots, num_pinned=locked, num_scratch=1 << 16, dtype=torch.float32, device=CPU,
        rates=ALL_MOVE,
    )  # fmt: skip
    expert_bytes = groups[0].expert_flat_bytes
    cache = ExpertCache([expert_bytes] * 3, num_experts=4, capacity_bytes=slots * expert_bytes)
    return groups, ExpertSource(groups, cache, memory), memory


@pytest.mark.parametrize("locked", [0, 5, 12], ids=["disk", "both", "locked"])
@pytest.mark.parametrize("slots", [1, 3, 12])
def test_slots_hold_the_experts_that_were_asked_for(slots: int, locked: int, folder: Path, log: Log) -> None:
    groups, source, memory = experts_of(folder, slots=slots, locked=locked)
    assert memory.num_pinned == locked
    store = LayerStore({entry.file for group in groups for record in group.experts for entry in record.entries})
    for experts in ([0, 2], [1, 2, 3], [0, 1, 2, 3], [3]):
        for row, group in enumerate(groups):
            found = []
            for expert in source.take(row, rows_of(experts)):
                found.append(expert.number)
                pieces = store.pieces(group.experts[expert.number])
                for name, blocks in expert.weights.items():
                    whole = torch.cat([piece.flatten() for piece in pieces[name]])
                    assert torch.equal(torch.cat(list(blocks)).flatten(), whole.float())
            assert sorted(found) == experts
    source.close()
    assert log[-1] == ("synchronize", "copy", 0)


def test_a_copy_waits_for_the_slots_last_reader_and_compute_for_the_copy(folder: Path, log: Log) -> None:
    _, source, memory = experts_of(folder, slots=1, locked=12)
    copied, released = id(memory._copied[0]), id(memory._released[0])
    log.clear()
    for _ in source.take(0, rows_of([1, 2])):
        log.append(("compute", "compute", 0))
    one = [
        ("wait", "copy", released), ("record", "copy", copied), ("wait", "compute", copied), ("compute", "compute", 0),
        ("record", "compute", released),
    ]  # fmt: skip
    assert log == [*one, *one]
    source.close()


def test_a_staging_buffer_is_filled_again_only_after_its_copy(folder: Path, log: Log) -> None:
    _, source, memory = experts_of(folder, slots=12, locked=0)
    stagings = {id(memory._staging.get_nowait().copied) for _ in range(memory._staging.qsize() - 1)}
    assert stagings
    log.clear()
    for _ in source.take(0, rows_of([0, 1, 2, 3])):
        pass
    waits = [event for what, who, event in log if (what, who) == ("wait", "reader")]
    assert len(waits) == 4
    assert len(set(waits)) == 1  # the one buffer that is left
    source.close()


@pytest.mark.parametrize("allowed", [0, 2, 5, 7])
def test_where_little_memory_can_be_locked_the_rest_is_read_from_its_files(
    allowed: int, folder: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = 0

    def register(_data: torch.Tensor, _device: torch.device) -> None:
        nonlocal locked
        if locked == allowed:
            raise PinningError("the limit on locked memory is reached")
        locked += 1

    monkeypatch.setattr(pinned, "register", register)
    groups, source, memory = experts_of(folder, slots=2, locked=12)
    assert memory.num_pinned == 4 * min(allowed, 3)
    for row in range(len(groups)):
        assert sorted(expert.number for expert in source.take(row, rows_of([0, 1, 2, 3]))) == [0, 1, 2, 3]
    source.close()


@pytest.mark.parametrize(("slots", "locked"), [(1, 0), (3, 12), (12, 5)])
def test_a_model_computes_with_it(
    slots: int, locked: int, folder: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = skeleton_of(folder).experts

    def on_device(store: LayerStore, *, num_scratch: int, dtype: torch.dtype) -> CudaExperts:
        return CudaExperts(
            store, groups, num_slots=slots, num_pinned=locked, num_scratch=num_scratch, dtype=dtype, device=CPU,
            rates=ALL_MOVE,
        )  # fmt: skip

    monkeypatch.setattr(hooking, "CpuExperts", on_device)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with on_demand(folder, room=slots) as model:
        for rows in (20, 1, 7, 1):
            assert torch.equal(logits(model.model, rows=rows), logits(reference, rows=rows))
