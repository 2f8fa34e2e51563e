"""Experts that are computed where they lie give what moved and resident ones give; rows travel instead of weights.

The device is a stand-in, and so is memory that is locked: what a real one does is in tests marked gpu.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from offload.checkpoint import read_checkpoint
from offload.experts import mixture
from offload.experts import on_demand as hooking
from offload.experts.cuda_experts import CudaExperts
from offload.experts.expert_cache import ExpertCache
from offload.experts.expert_group import ExpertGroup, ExpertWeight
from offload.experts.expert_placement import READ, place_on_demand, place_on_host
from offload.experts.expert_source import HandedExpert
from offload.layer_store import LayerStore
from offload.quantized_cache import load_or_quantize
from offload.streamed_model import StreamedModel
from profiles.in_place import HostRates
from tests.offload.experts.mixtures import MIXTURES, on_demand, placement_of, save_mixture, with_room_for
from tests.offload.streaming import CPU, UNLIMITED, logits, skeleton_of, unlimited_placement
from tests.support.simulated_device import SimulatedDevice, SimulatedEvent

CUDA = torch.device("cuda", 0)
ROWS = (20, 1, 7, 1)
UseDevice = Callable[..., Any]


def staying(row_flops: float, *, up_to_rows: float) -> HostRates:
    """Moving an expert takes a second, and computing it where it lies as long for so many rows."""
    return HostRates(link_bytes_per_s=1.0, bytes_per_s=math.inf, flops_per_s=row_flops * up_to_rows)


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> UseDevice:
    """Let models compute on a stand-in for a device, with so many slots, from which so many rows keep an expert."""

    def use(groups: Sequence[ExpertGroup], *, slots: int, pinned: int, up_to_rows: float) -> None:

        def memory(store: LayerStore, *, num_scratch: int, dtype: torch.dtype, keeps_cached: bool) -> CudaExperts:
            rates = staying(groups[0].row_flops / groups[0].expert_flat_bytes, up_to_rows=up_to_rows)
            return CudaExperts(
                store, groups, placement=placement_of(groups, slots=slots, pinned=pinned), num_scratch=num_scratch,
                dtype=dtype, device=SimulatedDevice(is_eager=True), rates=rates,
            )  # fmt: skip

        monkeypatch.setattr(hooking, "CpuExperts", memory)

    return use


# Neighbours in one half each
HALVES = (
    ((torch.bfloat16, 1, math.inf), (torch.float32, 1, 9.5)),
    ((torch.float32, 3, math.inf), (torch.bfloat16, 3, 9.5)),
)


@pytest.mark.parametrize(
    ("family", "dtype", "slots", "up_to_rows"),
    [(family, *case) for index, family in enumerate(MIXTURES) for case in HALVES[index % 2]],
)
def test_logits_are_those_of_resident_experts_bit_for_bit(
    family: str, dtype: torch.dtype, slots: int, up_to_rows: float, tmp_path: Path, on_device: UseDevice
) -> None:
    folder = save_mixture(tmp_path, family)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    on_device(skeleton_of(folder, dtype).expert_groups, slots=slots, pinned=100, up_to_rows=up_to_rows)
    with on_demand(folder, room=slots, dtype=dtype) as model:
        for rows in ROWS:
            assert torch.equal(logits(model.model, rows=rows), logits(reference, rows=rows))
        counts = model.expert_counts
    moved = counts.asked - counts.hits - counts.in_place
    assert counts.in_place > 0
    assert (moved == 0) == (up_to_rows == math.inf)
    assert (counts.read_bytes == 0) == (moved == 0)


@pytest.mark.parametrize("up_to_rows", [math.inf, 9.5], ids=["all-stay", "few-rows-stay"])
def test_packed_experts_are_unpacked_where_they_lie(
    up_to_rows: float, folder: Path, tmp_path: Path, on_device: UseDevice
) -> None:
    quantized = load_or_quantize(
        skeleton_of(folder), read_checkpoint(folder), "int8", cache_folder=tmp_path, device=CPU
    )

    skeleton = skeleton_of(folder, checkpoint=quantized)
    reference = StreamedModel(skeleton, unlimited_placement(skeleton), device=CPU)
    expected = [logits(reference.model, rows=rows) for rows in ROWS]
    reference.close()
    skeleton = skeleton_of(folder, checkpoint=quantized)
    assert skeleton.expert_groups[0].matrices[0].packing is not None
    on_device(skeleton.expert_groups, slots=2, pinned=100, up_to_rows=up_to_rows)
    placement = place_on_demand(
        skeleton.dense_records, skeleton.expert_groups, device_memory={}, device_budget_bytes=UNLIMITED, max_resident=0
    )
    model = StreamedModel(skeleton, with_room_for(placement, 2), device=CPU)
    for rows, logits_of in zip(ROWS, expected, strict=True):
        assert torch.equal(logits(model.model, rows=rows), logits_of)
    assert model.expert_counts.in_place > 0
    model.close()


def test_one_pass_moves_experts_of_many_rows_and_leaves_those_of_few_where_they_lie(
    folder: Path, on_device: UseDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[bool, list[int]] = {True: [], False: []}
    stays = HostRates.stays

    def noted(self: HostRates, expert_bytes: float, *, row_flops: float, rows: float) -> bool:
        found = stays(self, expert_bytes, row_flops=row_flops, rows=rows)
        asked[found].append(int(rows))
        return found

    monkeypatch.setattr(HostRates, "stays", noted)
    on_device(skeleton_of(folder).expert_groups, slots=1, pinned=100, up_to_rows=9.5)
    with on_demand(folder, room=1) as model:
        logits(model.model, rows=20)
    assert max(asked[True]) <= 9 < min(asked[False])


def test_experts_that_are_not_in_locked_memory_move(folder: Path, on_device: UseDevice) -> None:
    on_device(skeleton_of(folder).expert_groups, slots=3, pinned=4, up_to_rows=math.inf)  # those of the first layer are
    with on_demand(folder, room=3) as model:
        logits(model.model, rows=100)
        assert model.expert_counts.in_place == 4
        assert model.expert_counts.asked - model.expert_counts.hits - 4 == 8


def test_an_expert_that_stayed_comes_for_the_next_rows_where_the_link_is_idle(
    folder: Path, on_device: UseDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_device(skeleton_of(folder).expert_groups, slots=12, pinned=100, up_to_rows=math.inf)
    with on_demand(folder, room=12) as model:
        logits(model.model, rows=1)
        first = model.expert_counts
        assert (first.in_place, first.hits) == (6, 0)
        logits(model.model, rows=1)
        again = model.expert_counts - first
        assert (again.in_place, again.hits) == (0, 6)
    monkeypatch.setattr(SimulatedEvent, "query", lambda _self: False)  # the first copy never ends
    with on_demand(folder, room=12) as model:
        for _ in range(2):
            logits(model.model, rows=1)
        assert (model.expert_counts.in_place, model.expert_counts.hits) == (11, 1)


def test_what_decides_is_measured_where_experts_wait_in_locked_memory(folder: Path) -> None:
    groups = skeleton_of(folder).expert_groups

    def rates_of(*, slots: int, pinned: int) -> HostRates | None:
        store = LayerStore({entry.file for group in groups for record in group.experts for entry in record.entries})
        memory = CudaExperts(
            store, groups, placement=placement_of(groups, slots=slots, pinned=pinned), num_scratch=1 << 16,
            dtype=torch.float32, device=SimulatedDevice(is_eager=True),
        )  # fmt: skip
        memory.close()
        return memory._rates

    found = rates_of(slots=2, pinned=5)
    assert min(found.link_bytes_per_s, found.bytes_per_s, found.flops_per_s) > 0
    assert rates_of(slots=2, pinned=0) is None
    assert rates_of(slots=12, pinned=12) is None, "all have a slot"


@pytest.mark.parametrize(("room", "kept"), [(100, 12), (2, 2), (9, 7)])
def test_all_experts_can_stay_on_the_host(room: int, kept: int, folder: Path) -> None:
    """Where some are read, a quarter of those that would fit is on its way instead."""
    skeleton = skeleton_of(folder)
    expert_bytes = skeleton.expert_groups[0].expert_stored_bytes
    # What the dense parts take of RAM is known once they are placed.
    least = place_on_host(
        skeleton.dense_records, skeleton.expert_groups, device_memory={}, device_budget_bytes=UNLIMITED, host_memory={},
        host_budget_bytes=expert_bytes,
    )  # fmt: skip
    assert (least.experts.num_kept, least.experts.is_on_host) == (1, True)
    placement = place_on_host(
        skeleton.dense_records, skeleton.expert_groups, device_memory={"cache": 10}, device_budget_bytes=UNLIMITED,
        host_memory={"libraries": 10}, host_budget_bytes=10 + room * expert_bytes,
    )  # fmt: skip
    assert placement.experts.num_kept == kept
    assert placement.num_resident == 3
    assert placement.host_bytes.pop(READ, 0) == (0 if kept == 12 else (room - kept) * expert_bytes)
    assert placement.host_bytes == {"libraries": 10, f"{kept} of 12 experts": kept * expert_bytes}
    assert placement.streamed_bytes == placement.disk_bytes == (12 - kept) * expert_bytes
    model = StreamedModel(skeleton, placement, device=CPU)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for rows in ROWS:
        assert torch.equal(logits(model.model, rows=rows), logits(reference, rows=rows))
    model.close()


class OnDevice(torch.Tensor):
    """A tensor that says to be on a device, and that operations refuse beside one of another."""

    where: torch.device

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = [one for one in (*args, *(kwargs or {}).values()) if isinstance(one, cls)]
        if func == torch.Tensor.device.__get__:
            return own[0].where
        where, *others = {one.where for one in own}
        assert not others, f"{func} of tensors on {where} and {others}"
        if func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.to and isinstance(args[1], torch.device):
            where, args = args[1], args[:1]
            func, kwargs = torch.Tensor.clone, {}
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
        return placed(found, where) if isinstance(found, torch.Tensor) else found


def placed(tensor: torch.Tensor, where: torch.device) -> Any:
    found = tensor.as_subclass(OnDevice)
    found.where = where
    return found


@pytest.mark.parametrize("lies_on", [CPU, CUDA], ids=str)
def test_rows_travel_to_the_weights_and_what_is_made_of_them_comes_back(lies_on: torch.device) -> None:
    def there(*shape: int) -> Any:
        return placed(torch.randn(shape), CUDA)

    module: Any = SimpleNamespace(
        has_gate=True, has_bias=True, _apply_gate=lambda both: both[:, ::2],
        gate_up_proj_bias=[there(6)] * 2, down_proj_bias=[there(4)] * 2, has_post_expert_norm=True,
    )  # fmt: skip
    scale = there(4)
    module.post_expert_norm = lambda rows: rows * scale
    weights = {
        name: ExpertWeight(
            blocks=partial(list, [placed(torch.randn(shape), lies_on)]), dtype=torch.float32, is_transposed=False
        )
        for name, shape in (("gate_up_proj", (6, 4)), ("down_proj", (4, 3)))
    }
    expert = HandedExpert(number=1, weights=weights, device=lies_on)
    output = mixture._expert_output(module, expert, there(5, 4))
    assert (output.device, tuple(output.shape)) == (CUDA, (5, 4))


def test_an_expert_that_comes_afterwards_takes_no_place_from_one_in_use(
    folder: Path, on_device: UseDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache that does not know what is in use would let it be overwritten."""
    admit = ExpertCache.admit
    overwritten: list[tuple[int, int]] = []

    def noted(self: ExpertCache, row: int, expert: int) -> Any:
        before = self._is_in_use.copy()
        leaving = admit(self, row, expert)
        overwritten.extend(pair for pair in leaving or [] if before[pair])
        return leaving

    monkeypatch.setattr(ExpertCache, "admit", noted)
    on_device(skeleton_of(folder).expert_groups, slots=2, pinned=100, up_to_rows=5.5)
    with on_demand(folder, room=2) as model:
        for rows in ROWS:
            logits(model.model, rows=rows)
    assert not overwritten
