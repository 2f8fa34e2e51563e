"""A module's sum is PEFT's to the bit: both products and the sum in float32, in the adapters' order, rounded once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from offload.adapters.fit import FittedAdapter
from offload.adapters.forward import LoadedAdapters, row_dim
from offload.adapters.peft_folder import read_peft_folder
from offload.adapters.use import AdapterUse, rows_under_way
from offload.formats.storage import Quantizer
from offload.layouts.int4 import INT4
from offload.layouts.nf4_cpu import Nf4Cpu
from offload.layouts.onednn import hook_linear_layers, multiply
from offload.native.compiler import is_available
from offload.packed_weight import PackedModule, PackedWeight, weight_of
from tests.support.adapters import PREFIX, write_adapter

ROWS = torch.randn(9, 32, generator=torch.Generator().manual_seed(3))


class Model(nn.Module):
    """One layer of each kind."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(32, 48)
        self.turned = Conv1D(48, 32)


@contextmanager
def adapted(model: nn.Module, *folders: Path) -> Iterator[None]:
    fitted = [
        FittedAdapter(name=folder.name, deltas=read_peft_folder(folder).deltas, replaced={}, num_bytes=0)
        for folder in folders
    ]
    dtype = next(model.parameters()).dtype
    with ExitStack() as undo:
        LoadedAdapters(fitted, dtype=dtype, device=torch.device("cpu")).attach(model, undo)
        yield


@torch.no_grad()
def called(module: Any, rows: Tensor, *runs: tuple[AdapterUse, int]) -> Tensor:
    token = rows_under_way.set(runs)
    try:
        found: Tensor = module(rows)
        return found
    finally:
        rows_under_way.reset(token)


@torch.no_grad()
def added(folder: Path, module: str, rows: Tensor, scale: float, *, by_kernel: bool) -> Tensor:
    """What an adapter adds to rows, as PEFT has it: (x A) B times the scale, by the products of this processor."""
    tensors = load_file(folder / "adapter_model.safetensors")
    down, up = (tensors[f"{PREFIX}{module}.lora_{part}.weight"] for part in "AB")
    if not by_kernel:
        return multiply(multiply(rows.float(), down), up) * scale
    from offload.native.low_rank import LowRankWeight

    native, found = LowRankWeight.of(down, up, None), torch.zeros(len(rows), len(up))
    native.add(rows.float(), found, 1.0)
    return found * scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["linear", "turned"])
@pytest.mark.parametrize("by_kernel", [True, False])
def test_the_sum_is_made_in_float32_in_the_given_order_and_rounded_once(
    by_kernel: bool, name: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another order, each sum rounded by itself, and a scale that counts twice are other numbers."""
    by_kernel = by_kernel and is_available()
    monkeypatch.setattr("offload.adapters.forward.is_available", lambda: by_kernel)
    model = Model().to(dtype)
    one, two = (write_adapter(tmp_path / word, model, [name], seed=seed) for seed, word in enumerate(("one", "two")))
    rows, module = ROWS.to(dtype), model.get_submodule(name)
    with torch.no_grad():
        base = module(rows)
    first, second = (
        added(folder, name, rows, scale * 1.5, by_kernel=by_kernel) for folder, scale in ((one, 2.0), (two, 0.3))
    )
    with adapted(model, one, two):
        found = called(module, rows, ((("one", 2.0), ("two", 0.3)), 9))
        assert torch.equal(called(module, rows), base)
    assert torch.equal(found, (base.float() + first + second).to(dtype))
    wrong: list[Callable[[], Tensor]] = [
        lambda: (base.float() + second + first).to(dtype) if dtype == torch.float32 else -base,
        lambda: ((base.float() + first).to(dtype) + second).to(dtype) if dtype == torch.bfloat16 else -base,
        lambda: (base.float() + first + second * 0.3).to(dtype),
        lambda: (base.float() + first * 1.5 + second * 1.5).to(dtype),
    ]
    assert not any(torch.equal(found, other()) for other in wrong)
    with torch.no_grad():
        assert torch.equal(module(rows), base), "nothing is left of them"


@torch.no_grad()
@pytest.mark.parametrize("storage", [Nf4Cpu(), INT4], ids=["nf4", "int4"])
def test_lengths_of_packed_rows_are_those_of_the_unpacked_numbers(storage: Quantizer, tmp_path: Path) -> None:
    """A kernel's own values are less exact: magnitudes by its products would change all that it makes."""
    module = nn.Linear(64, 64, bias=False)
    folder = write_adapter(tmp_path / "one", nn.ModuleDict({"linear": module}), ["linear"], use_dora=True)
    own, parts = storage.pack(module.weight.detach())
    packed = PackedWeight((64, 64), own)
    for part, numbers in parts.items():
        packed._parameters[part] = nn.Parameter(numbers, requires_grad=False)
    module.add_module("weight_packed", packed)
    module._parameters["weight"] = nn.Parameter(module.weight.to("meta"), requires_grad=False)
    rows = torch.randn(9, 64, generator=torch.Generator().manual_seed(3))
    tensors = {name.removeprefix(PREFIX): one for name, one in load_file(folder / "adapter_model.safetensors").items()}
    down, up, magnitude = (tensors[f"linear.lora_{end}"] for end in ("A.weight", "B.weight", "magnitude_vector"))
    model = nn.ModuleDict({"linear": module})
    with ExitStack() as undo:
        PackedModule(module, [("weight", packed)]).hook(torch.empty(64 * 64), undo)
        base = module(rows)
        with adapted(model, folder):
            found = called(module, rows, ((("one", 1.0),), 9))
        share = magnitude / (weight_of(module) + 1.5 * up @ down).norm(dim=1)
    wanted = share * (base + rows @ down.T @ up.T * 1.5)
    assert float((found - wanted).abs().max() / wanted.abs().max()) < 1e-6


def test_runs_of_rows_have_each_their_own(tmp_path: Path) -> None:
    """Runs of one choice are gathered, also where others lie between them."""
    model = Model()
    one, two = (
        write_adapter(tmp_path / word, model, ["linear"], seed=seed) for seed, word in enumerate(("one", "two"))
    )
    a: AdapterUse = (("one", 1.0),)
    b: AdapterUse = (("one", 1.0), ("two", -0.5))
    runs: list[tuple[AdapterUse, int]] = [(a, 2), ((), 1), (b, 3), (a, 1), ((("other", 1.0),), 2)]
    hook_linear_layers(model, torch.float32, ExitStack())  # by which a row has its bits in any company
    with adapted(model, one, two):
        for rows in (ROWS, ROWS[None]):
            found = called(model.linear, rows, *runs).view(9, -1)
            first = 0
            for use, count in runs:
                alone = called(model.linear, ROWS[first : first + count], (use, count))
                assert torch.equal(found[first : first + count], alone), use
                first += count


SHAPES: dict[str, tuple[Tensor, int, int | None]] = {
    "rows": (torch.empty(5, 8), 5, 0),
    "of a batch": (torch.empty(1, 5, 8), 5, 1),
    "heads behind rows": (torch.empty(1, 4, 4, 8), 4, 1),
    "heads before rows": (torch.empty(1, 4, 4, 8).transpose(1, 2), 4, 2),
    "of several streams": (torch.empty(4, 1, 4, 8), 4, 2),
    "heads behind rows alone": (torch.empty(4, 4, 8), 4, 0),
    "others": (torch.empty(1, 3, 8), 5, None),
    "as many columns": (torch.empty(1, 3, 5), 5, None),
}


@pytest.mark.parametrize("of", SHAPES)
def test_the_dimension_of_rows(of: str) -> None:
    rows, num_rows, dim = SHAPES[of]
    assert row_dim(rows, num_rows) == dim
