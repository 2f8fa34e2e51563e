"""Packed weights in a model: which of them are unpacked, and into how much memory."""

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config

from offload.checkpoint import read_checkpoint
from offload.layouts import known
from offload.layouts.layout import ComputeLayout, Kernel
from offload.packed_weight import PackedWeight, weight_of
from offload.quantized_cache import load_or_quantize
from offload.skeleton import Skeleton
from tests.offload.formats.whole_steps import WholeSteps
from tests.offload.streaming import CPU, skeleton_of, streamed_logits, unlimited_placement
from tests.support.families import FAMILIES, LATENT, SMALL, make_model, save_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class MultipliedSteps(WholeSteps):
    """Whole steps with a kernel, which takes any number of rows unless `max_rows` says otherwise."""

    max_rows: int = sys.maxsize

    def kernel(self, *_: object) -> Kernel:
        def multiply(parts: Mapping[str, Tensor], rows: Tensor, bias: Tensor | None) -> Tensor:
            return torch.nn.functional.linear(rows, parts["steps"] * parts["size"], bias)

        return Kernel(max_rows=self.max_rows, multiply=multiply)

    def unpack(self, parts: Mapping[str, Tensor], out: Tensor) -> Tensor:
        assert self.max_rows < sys.maxsize, "a weight whose kernel takes any number of rows is never unpacked"
        return WholeSteps.unpack(self, parts, out)


def skeleton_in(packer: WholeSteps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Skeleton:
    monkeypatch.setattr(known, "FORMATS", (packer, *known.FORMATS))
    monkeypatch.setattr(known, "QUANTIZERS", (packer,))
    has_kernel = isinstance(packer, MultipliedSteps)
    monkeypatch.setattr(known, "LAYOUTS", (ComputeLayout(own=packer, kernel=packer.kernel),) if has_kernel else ())
    folder = tmp_path / "model"
    if not folder.exists():
        save_folder(folder, make_model(FAMILIES["llama"](), dtype=torch.bfloat16))
    checkpoint = read_checkpoint(folder)
    source = skeleton_of(folder, checkpoint=checkpoint)
    quantized = load_or_quantize(source, checkpoint, packer.name, cache_folder=tmp_path / "cache", device=CPU)
    return skeleton_of(folder, checkpoint=quantized)


def num_weights(skeleton: Skeleton) -> list[int]:
    return [module.num_weights for module in skeleton.packed]


def test_what_is_multiplied_packed_by_any_number_of_rows_takes_no_memory_to_unpack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, scratch, planned_bytes = [], [], []
    for packer in (WholeSteps(), MultipliedSteps(max_rows=4), MultipliedSteps()):
        skeleton = skeleton_in(packer, tmp_path, monkeypatch)
        scratch.append(skeleton.num_scratch(torch.float32, CPU))
        planned_bytes.append(skeleton.unpack_bytes(torch.float32, CPU))
        found.append(streamed_logits(skeleton, unlimited_placement(skeleton), rows=20))
    for one in found[1:]:
        torch.testing.assert_close(one, found[0], rtol=0, atol=1e-5)
    assert scratch == [max(num_weights(skeleton)), max(num_weights(skeleton)), 0]
    assert planned_bytes[0] == planned_bytes[1] == planned_bytes[2] + 4 * scratch[0]


def test_a_weight_that_is_never_unpacked_has_no_hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (packed, *_), hooks = skeleton_in(MultipliedSteps(), tmp_path, monkeypatch).packed, ExitStack()
    own = packed.module.forward
    packed.hook(torch.empty(0), hooks)
    assert not packed.module._forward_pre_hooks
    assert packed.module.forward != own
    hooks.close()
    assert packed.module.forward == own


def test_a_weight_that_others_read_keeps_its_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Latent attention reads that which expands its latents: no kernel takes it, and no form."""
    save_folder(tmp_path / "model", make_model(DeepseekV3Config(**SMALL, **LATENT)))
    skeleton = skeleton_in(MultipliedSteps(max_rows=4), tmp_path, monkeypatch)
    names = {module: name for name, module in skeleton.model.named_modules()}
    found = {names[packed.module]: packed for packed in skeleton.packed}
    read = {name for name, packed in found.items() if packed.kernel(torch.float32, CPU) is None}
    assert read == {name for name in found if name.endswith("kv_b_proj")} != set()


def test_the_weight_of_a_layer_is_unpacked_if_it_is_packed() -> None:
    layer = torch.nn.Linear(4, 3, bias=False)
    assert weight_of(layer) is layer.weight
    packed = PackedWeight((3, 4), WholeSteps())
    steps = torch.arange(-6, 6, dtype=torch.int32).view(3, 4)
    for part, value in (("steps", steps), ("size", torch.tensor([0.5]))):
        packed._parameters[part] = torch.nn.Parameter(value, requires_grad=False)
    layer.weight = torch.nn.Parameter(torch.empty(3, 4, device="meta", dtype=torch.bfloat16))
    layer.add_module("weight_packed", packed)
    found = weight_of(layer)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, 0.5 * steps.to(torch.bfloat16))
