"""oneDNN's products of linear layers: right, the same for any number of rows, and left out where they cannot be."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from offload.layouts import onednn
from offload.layouts.onednn import (
    has_onednn,
    hook_linear_layers,
    in_few_sizes,
    in_kernel_order,
    padded_rows,
    takes_kernel_order,
)
from offload.streamed_model import StreamedModel
from tests.offload.streaming import CPU, logits, skeleton_of, unlimited_placement
from tests.support.families import FAMILIES, RECURRENT, make_model, save_folder

DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if has_onednn(dtype)]
pytestmark = pytest.mark.skipif(not DTYPES, reason="this build of torch has no such products here")


def layer(dtype: torch.dtype, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(200, 300, bias=bias, dtype=dtype).requires_grad_(False)


@pytest.mark.parametrize("num_part_rows", [0, 300, 128], ids=["as stored", "in the kernel's order", "in three parts"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_alone_and_among_others(dtype: torch.dtype, num_part_rows: int) -> None:
    module, rows = layer(dtype), torch.randn(1, 80, 200).to(dtype)
    exact = rows.double() @ module.weight.double().T + module.bias.double()
    with ExitStack() as undo:
        if num_part_rows:
            module.kernel_order = [*map(in_kernel_order, module.weight.split(num_part_rows))]
        hook_linear_layers(module, dtype, undo)
        alone = module(rows[:, :1])
        assert alone.shape == (1, 1, 300)
        assert module(rows[:, :0]).shape == (1, 0, 300), "an expert that no row goes through"
        assert (alone - exact[:, :1]).norm() / exact[:, :1].norm() < 4 * torch.finfo(dtype).eps
        for count in (2, 3, 7, 16, 17, 64, 80):
            assert torch.equal(module(rows[:, :count])[:, :1], alone), count
    assert "forward" not in vars(module)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_routers_row_has_the_same_bits_among_any_rows(dtype: torch.dtype) -> None:
    """Torch's own product of one row has others, of which some choose other experts."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(hidden_size=2048, num_experts=128, num_experts_per_tok=8)
    router = Qwen3MoeTopKRouter(config).to(dtype).requires_grad_(False)
    router.weight.normal_()
    rows = torch.randn(300, 2048).to(dtype)
    with ExitStack() as undo:
        hook_linear_layers(router, dtype, undo)
        alone = torch.cat([router(row[None])[0] for row in rows])
        for count in (2, 3, 16, 64):
            assert torch.equal(torch.cat([router(part)[0] for part in rows.split(count)]), alone), count
        assert torch.allclose(alone.float(), rows.float() @ router.weight.float().T, rtol=0.02, atol=0.5)
    assert "forward" not in vars(router)


def test_few_numbers_of_rows_occur() -> None:
    """OneDNN keeps code for each number of rows and shape of a weight, for as long as the process lives."""
    for is_ordered, least in ((False, 2), (True, 4)):
        padded = {rows: padded_rows(rows, is_ordered=is_ordered) for rows in range(1, 513)}
        assert all(rows <= number < rows + 64 for rows, number in padded.items())
        assert len(set(padded.values())) == 20 - is_ordered
        assert min(padded.values()) == least


def test_rows_of_zeros_make_few_numbers_of_rows_of_bf16() -> None:
    """Torch keeps code for each number of rows of a product in bf16, 0.5 MiB and more."""
    rows = torch.randn(256, 8).bfloat16()
    found = {count: in_few_sizes(rows[:count]) for count in range(257)}
    assert len({len(padded) for count, padded in found.items() if count > 1}) <= 16
    assert all(torch.equal(padded[:count], rows[:count]) for count, padded in found.items())
    assert not any(padded[count:].any() for count, padded in found.items())
    assert [len(found[count]) for count in (0, 1)] == [0, 2], "one row gets the code of several, whose bits it has"
    assert in_few_sizes(rows[:5].float()).shape == (5, 8)


@pytest.mark.parametrize("num_part_rows", [0, 300, 128], ids=["as stored", "in the kernel's order", "in three parts"])
def test_one_row_is_padded_to_the_number_that_is_fastest(num_part_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    multiplied: list[int] = []
    product = onednn._product

    def noting(rows: torch.Tensor, *others: Any) -> torch.Tensor:
        multiplied.append(rows.shape[-2])
        assert not rows[1:].any()
        return product(rows, *others)

    monkeypatch.setattr(onednn, "_product", noting)
    module = layer(DTYPES[0])
    with ExitStack() as undo:
        if num_part_rows:
            module.kernel_order = [*map(in_kernel_order, module.weight.split(num_part_rows))]
        hook_linear_layers(module, DTYPES[0], undo)
        module(torch.randn(1, 1, 200).to(DTYPES[0]))
    assert multiplied == [4 if num_part_rows else 2]


def test_gradients_and_other_numbers_take_torchs_own_product() -> None:
    module, rows = layer(torch.float32, bias=False), torch.randn(3, 200, requires_grad=True)
    with ExitStack() as undo:
        hook_linear_layers(module, torch.float32, undo)
        module(rows).sum().backward()
        assert rows.grad is not None
        module.double()
        assert module(rows.detach().double()).dtype == torch.float64


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=["mapped", "converted"])
def test_resident_layers_keep_one_copy_of_their_weights(stored: torch.dtype, tmp_path: Path) -> None:
    """A mapped weight stays in its file; a converted one is let go. The bits are those of layers that stream."""
    folder = save_folder(tmp_path, make_model(FAMILIES["llama"](), dtype=stored))
    skeleton, streaming = (skeleton_of(folder, torch.float32) for _ in range(2))
    name = "model.layers.0.mlp.up_proj.weight"
    placements = unlimited_placement(skeleton), unlimited_placement(streaming, resident=0)
    with (
        closing(StreamedModel(skeleton, placements[0], device=CPU)) as model,
        closing(StreamedModel(streaming, placements[1], device=CPU)) as streamed,
    ):
        module = model.model.get_submodule(name.removesuffix(".weight"))
        assert [part.shape for part in vars(module)["kernel_order"]] == [module.weight.shape]
        assert module.weight.is_meta == (stored != torch.float32)
        for rows in (1, 5):
            assert torch.equal(logits(model.model, rows=rows), logits(streamed.model, rows=rows))
    assert "kernel_order" not in vars(module)


def test_a_weight_that_its_parent_reads_stays_as_it_is() -> None:
    """Mamba multiplies by `dt_proj.weight` itself."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(RECURRENT["jamba"]())
    mixers = {name.rpartition(".")[2]: name for name, _ in model.named_modules() if ".mamba." in name}
    assert takes_kernel_order(model, f"{mixers['in_proj']}.weight")
    assert not takes_kernel_order(model, f"{mixers['dt_proj']}.weight")
    assert not takes_kernel_order(model, "model.embed_tokens.weight")
    assert not takes_kernel_order(model, f"{mixers['dt_proj']}.bias")
