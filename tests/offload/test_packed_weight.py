"""Packed weights in a model: which of them are unpacked, and into how much memory."""

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from offload.checkpoint import read_checkpoint
from offload.formats import known
from offload.formats.packed_format import Kernel
from offload.quantized_cache import load_or_quantize
from offload.skeleton import Skeleton
from tests.conftest import FAMILIES, make_model, save_folder
from tests.offload.formats.whole_steps import WholeSteps
from tests.offload.streaming import CPU, skeleton_of, streamed_logits, unlimited_placement


@dataclass(frozen=True, slots=True, kw_only=True)
class MultipliedSteps(WholeSteps):
    """Whole steps with a kernel, which takes any number of rows unless `max_rows` says otherwise."""

    max_rows: int = sys.maxsize

    def kernel(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Kernel:  # type: ignore[override]
        def multiply(parts: Mapping[str, Tensor], rows: Tensor, bias: Tensor | None) -> Tensor:
            return torch.nn.functional.linear(rows, parts["steps"] * parts["size"], bias)

        return Kernel(max_rows=self.max_rows, multiply=multiply)

    def unpack(self, parts: Mapping[str, Tensor], out: Tensor) -> Tensor:
        assert self.max_rows < sys.maxsize, "a weight whose kernel takes any number of rows is never unpacked"
        return WholeSteps.unpack(self, parts, out)


def skeleton_in(packer: WholeSteps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Skeleton:
    monkeypatch.setattr(known, "FORMATS", (packer, *known.FORMATS))
    monkeypatch.setattr(known, "PACKERS", (packer,))
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
    skeleton = skeleton_in(MultipliedSteps(), tmp_path, monkeypatch)
    (packed, *_), hooks = skeleton.packed, ExitStack()
    own = packed.module.forward
    packed.hook(torch.empty(0), hooks)
    assert not packed.module._forward_pre_hooks
    assert packed.module.forward != own
    hooks.close()
    assert packed.module.forward == own
