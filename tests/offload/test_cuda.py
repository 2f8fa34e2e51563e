"""On a CUDA device: streamed logits equal resident ones, from every tier, packed or not, whatever is slow."""

import dataclasses
import math
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from offload.checkpoint import Checkpoint, read_checkpoint
from offload.device import CudaDevice, PinningError
from offload.experts.cuda_experts import CudaExperts
from offload.experts.expert_placement import place_on_demand, place_on_host
from offload.loaders import CudaLoader
from offload.pinned import PinnedBuffer
from offload.placement import place_layers, with_pinned_layers
from offload.quantized_cache import load_or_quantize
from offload.streamed_model import StreamedModel
from profiles.in_place import HostRates
from tests.offload.experts.mixtures import save_mixture
from tests.offload.streaming import UNLIMITED, logits, skeleton_of
from tests.support.families import FAMILIES, make_model, save_folder

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA = torch.device("cuda", 0)
TIERS = ("disk", "pinned")


@contextmanager
def on_device(folder: Path, checkpoint: Checkpoint, *, resident: int, tier: str) -> Iterator[PreTrainedModel]:
    skeleton = skeleton_of(folder, torch.bfloat16, checkpoint=checkpoint)
    placement = place_layers(
        skeleton.records, device_memory={}, device_budget_bytes=UNLIMITED, host_memory={}, host_budget_bytes=UNLIMITED,
        max_resident=resident,
    )  # fmt: skip
    if tier == "disk":  # as where no memory can be locked for them: a limit of bytes would keep so few small layers
        placement = with_pinned_layers(placement, skeleton.records, frozenset())
    assert placement.num_on_disk == (3 - resident if tier == "disk" else 0)
    with closing(StreamedModel(skeleton, placement, device=CUDA)) as model:
        yield model.model


def quantized(folder: Path, quant: str, cache: Path) -> Checkpoint:
    checkpoint = read_checkpoint(folder)
    if quant == "none":
        return checkpoint
    skeleton = skeleton_of(folder, torch.bfloat16)
    return load_or_quantize(skeleton, checkpoint, quant, cache_folder=cache, device=CUDA)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("quant", ["none", "int8", "nf4"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3-moe", "gemma3"])
def test_streamed_logits_equal_resident_logits(family: str, quant: str, tier: str, tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "model", make_model(FAMILIES[family](), dtype=torch.bfloat16), shard="20KB")
    checkpoint = quantized(folder, quant, tmp_path / "cache")
    with on_device(folder, checkpoint, resident=3, tier=tier) as model:
        expected = logits(model, passes=3)
    for resident in (0, 1):
        with on_device(folder, checkpoint, resident=resident, tier=tier) as model:
            assert torch.equal(logits(model, passes=3), expected)


@pytest.mark.parametrize("slow", ["load", "release"])
@pytest.mark.parametrize("tier", TIERS)
def test_results_do_not_depend_on_what_is_slow(
    slow: str, tier: str, pair_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = read_checkpoint(pair_folders[0])
    with on_device(pair_folders[0], checkpoint, resident=3, tier=tier) as model:
        expected = logits(model, passes=3)
    original: Any = getattr(CudaLoader, slow)

    def sleepy(self: CudaLoader, *arguments: Any) -> None:
        if slow == "load":
            with torch.cuda.stream(self._slots.copy_stream):
                torch.cuda._sleep(10_000_000)
        else:
            torch.cuda._sleep(10_000_000)  # the layer's readers are still at work when it is given back
        original(self, *arguments)

    monkeypatch.setattr(CudaLoader, slow, sleepy)
    with on_device(pair_folders[0], checkpoint, resident=0, tier=tier) as model:
        for _ in range(3):
            assert torch.equal(logits(model, passes=3), expected)


@pytest.mark.parametrize("up_to_rows", [0.0, 9.5, math.inf, None], ids=["move", "few-stay", "stay", "left-to-the-cpu"])
@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss", "granite-moe"])
def test_experts_on_demand_give_what_resident_ones_give(
    family: str, up_to_rows: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts of up to so many rows stay in RAM; None leaves all to the CPU."""
    folder = save_mixture(tmp_path, family)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().to(CUDA)
    skeleton = skeleton_of(folder)
    group = skeleton.expert_groups[0]
    rates = HostRates(
        link_bytes_per_s=group.expert_flat_bytes,
        bytes_per_s=math.inf,
        flops_per_s=group.row_flops * (up_to_rows or 1e-9),
    )
    monkeypatch.setattr(CudaExperts, "_measured", lambda *_: rates)
    place = place_on_host if up_to_rows is None else place_on_demand
    placement = place(
        skeleton.dense_records, skeleton.expert_groups, device_memory={}, device_budget_bytes=UNLIMITED, host_memory={},
        host_budget_bytes=UNLIMITED, max_resident=0,
    )  # fmt: skip
    assert placement.experts is not None
    experts = dataclasses.replace(
        placement.experts, num_kept=2, num_pinned=0 if up_to_rows is None else placement.experts.num_experts
    )
    with closing(StreamedModel(skeleton, dataclasses.replace(placement, experts=experts), device=CUDA)) as model:
        torch.testing.assert_close(logits(model.model, passes=3), logits(reference, passes=3), atol=1e-4, rtol=1e-4)
        assert (model.expert_counts.in_place > 0) == (up_to_rows not in {0.0, None})


def test_locked_memory_is_as_large_as_asked_for_and_copies_asynchronously() -> None:
    buffer = PinnedBuffer(3 << 20, device=CudaDevice(CUDA))
    assert buffer.bytes.is_pinned()
    buffer.bytes.fill_(7)
    assert int(buffer.bytes.to(CUDA, non_blocking=True).sum()) == 7 * (3 << 20)
    torch.cuda.synchronize()
    buffer.close()


def test_a_refused_lock_is_an_error_of_ours_and_leaves_the_device_usable() -> None:
    buffer = PinnedBuffer(1 << 20, device=CudaDevice(CUDA))
    with pytest.raises(PinningError, match="failed with code"):
        CudaDevice(CUDA).lock(buffer.bytes)  # locked already: the driver refuses, and remembers that it did
    assert int(torch.ones(3, device=CUDA).sum()) == 3
    buffer.close()


def test_nothing_is_allocated_on_the_device_after_the_first_pass(pair_folders: tuple[Path, Path]) -> None:
    with on_device(pair_folders[0], read_checkpoint(pair_folders[0]), resident=0, tier="pinned") as model:
        logits(model, passes=3)
        before = torch.cuda.memory_stats(CUDA)["segment.all.allocated"]
        for _ in range(5):
            logits(model, passes=3)
        assert torch.cuda.memory_stats(CUDA)["segment.all.allocated"] == before
