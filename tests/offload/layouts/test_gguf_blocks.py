"""GGML's blocks are multiplied as they lie in the file."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from offload.checkpoint import TensorEntry
from offload.formats.gguf import GGUF
from offload.formats.gguf_blocks import TYPES
from offload.formats.gguf_unpacking import NAMES
from offload.formats.published import PublishedWeight
from offload.formats.storage import StoredParameter
from offload.layouts import gguf_blocks
from offload.layouts.at_load import layout_at_load
from offload.layouts.gguf_blocks import GgufBlocks, native
from offload.layouts.known import kernel_of
from offload.layouts.layout import Kernel
from offload.native.block_grids import ALL_TEXTS
from offload.native.compiler import is_available
from tests.offload.layouts.products import check_products, check_wrong_kernels_are_refused

CPU, BF16 = torch.device("cpu"), torch.bfloat16
SHAPE = (64, 512)
needs_kernels = pytest.mark.skipif(not is_available(), reason="no kernels can be compiled here")


def stored(name: str, *, heads: int = 0, shape: tuple[int, int] = SHAPE) -> tuple[PublishedWeight, torch.Tensor]:
    """A matrix of small random numbers as a file has it: rows in order, or those of so many heads' halves in turn."""
    kind, (rows, columns) = TYPES[name], shape
    blocks = torch.randint(0, 61, (rows, columns // kind.weights * kind.num_bytes)).to(torch.uint8)
    blocks = blocks.view(heads, rows // heads, -1) if heads else blocks
    leaf = f"p.gguf_{name.lower()}"
    pieces = (TensorEntry.planned(leaf, tuple(blocks.shape), torch.uint8),)
    packing = GGUF.detect(StoredParameter(name="p.weight", shape=shape, stored={leaf: pieces}, stated={}))
    assert isinstance(packing, PublishedWeight)
    return packing, blocks


@needs_kernels
@pytest.mark.parametrize(("name", "heads"), [*((name, 0) for name in NAMES), (NAMES[0], 2), (NAMES[-1], 2)])
def test_products_are_near_those_of_bf16_weights_and_a_row_has_its_bits_in_any_company(name: str, heads: int) -> None:
    packing, blocks = stored(name, heads=heads)
    parts, weight = {"blocks": blocks}, packing.unpack({"blocks": blocks}, torch.empty(SHAPE)).double()
    rows = torch.randn(81, SHAPE[1]).bfloat16()
    for dtype, most in ((BF16, 0.0025), (torch.float32, 2e-5)):
        kernel, found = check_products(kernel_of(packing, SHAPE, dtype, CPU), parts, rows.to(dtype), weight, most=most)
    in_order = native(name, SHAPE[1], native_rows(kernel, parts))
    assert torch.equal(found, in_order.product(rows.float()))


def native_rows(kernel: Kernel, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """The rows in the order in which a whole pass is told to read them."""
    weight = kernel.native(parts)
    assert (weight.rows, weight.columns, weight.record[0]) == (*SHAPE, parts["blocks"].data_ptr())
    in_turn = parts["blocks"].reshape(-1, weight.record[4] // 2, 2, parts["blocks"].shape[-1])
    return in_turn.transpose(1, 2).reshape(SHAPE[0], -1)


@needs_kernels
def test_an_experts_gates_and_ups_are_multiplied_as_they_lie_one_matrix_behind_the_other() -> None:
    packing, blocks = stored("Q4_K")
    of_expert = replace(packing, num_matrices=2)
    shape, parts = (2 * SHAPE[0], SHAPE[1]), {"blocks": torch.stack((blocks, blocks.flip(0)))}
    kernel = kernel_of(of_expert, shape, torch.float32, CPU)
    weight, rows = of_expert.unpack(parts, torch.empty(shape)).double(), torch.randn(5, SHAPE[1]).bfloat16().float()
    found, exact = kernel.multiply(parts, rows, None), rows.double() @ weight.T
    assert float((found.double() - exact).norm() / exact.norm()) < 2e-5
    assert kernel.native(parts).rows == shape[0]


def expert_in_turn(of_shape: tuple[int, int] = SHAPE) -> tuple[PublishedWeight, torch.Tensor]:
    """One of three experts whose gates and ups are two matrices in the file, and rows in turn of the module's."""
    leaf, (rows, columns), num_experts = "p.gguf_mxfp4", of_shape, 3
    shape = (rows // 2, columns // TYPES["MXFP4"].weights * TYPES["MXFP4"].num_bytes)
    pieces = tuple(
        replace(TensorEntry.planned(leaf, shape, torch.uint8), is_in_turn=True) for _ in range(2 * num_experts)
    )
    experts = StoredParameter(name="p.weight", shape=(num_experts, columns, rows), stored={leaf: pieces}, stated={})
    packing = GGUF.detect(experts)
    assert isinstance(packing, PublishedWeight)
    share = packing.of_share((num_experts, columns, rows), num_experts)
    one = None if share is None else share.transposed
    assert one is not None
    return one, torch.randint(0, 61, (2, *shape)).to(torch.uint8)


@needs_kernels
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_an_experts_gates_and_ups_in_turn_are_multiplied_as_two_matrices_lie_in_the_file(dtype: torch.dtype) -> None:
    (one, blocks), columns = expert_in_turn(), SHAPE[1]
    parts = {"MXFP4": blocks}
    weight = one.unpack(parts, torch.empty(SHAPE)).double()
    kernel = kernel_of(one, SHAPE, dtype, CPU)
    given = torch.randn(5, columns).to(dtype)
    found = kernel.multiply(parts, given, None)
    exact = given.double() @ weight.T
    assert float((found.double() - exact).norm() / exact.norm()) < 0.003
    assert torch.equal(kernel.multiply(parts, given[3:4], None), found[3:4])
    assert kernel.native(parts).in_halves


@needs_kernels
def test_what_it_does_not_know_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    packing, _ = stored("Q6_K")
    assert set(NAMES) == set(ALL_TEXTS)
    assert kernel_of(packing, SHAPE, BF16, torch.device("cuda")) is None
    assert kernel_of(packing, SHAPE, torch.float16, CPU) is None
    assert kernel_of(replace(packing, is_transposed=True), SHAPE, BF16, CPU) is None
    assert kernel_of(replace(packing, num_matrices=2), (2, *SHAPE), BF16, CPU) is None
    assert kernel_of(stored("Q6_K", shape=(33, 512))[0], (33, 512), BF16, CPU) is None
    monkeypatch.setattr(gguf_blocks, "is_available", lambda: False)
    assert kernel_of(packing, SHAPE, BF16, CPU) is None


@needs_kernels
def test_kernels_whose_products_are_wrong_are_not_used() -> None:
    packing, _ = stored("Q4_0")

    def another_types_text(patched: pytest.MonkeyPatch) -> None:
        patched.setattr(gguf_blocks, "native", lambda _name, *given: native("IQ4_NL", *given))

    check_wrong_kernels_are_refused(
        gguf_blocks, lambda: kernel_of(packing, SHAPE, BF16, CPU) is not None, another_types_text
    )


@needs_kernels
def test_numbers_of_four_and_of_eight_bits_have_a_faster_layout_at_load_and_others_stay_as_they_lie() -> None:
    for name, layout in (("Q4_0", "int4"), ("Q4_K", "int4"), ("Q6_K", "byte-lanes"), ("IQ4_XS", None)):
        found = layout_at_load(stored(name)[0], SHAPE, BF16, CPU)
        assert (None if found is None else found.own.name) == layout


def test_a_sample_of_any_shape_measures_its_speed() -> None:
    packing = GgufBlocks(block=TYPES["Q6_K"])
    (shape, dtype), *_ = packing.part_shapes((64, 512)).values()
    blocks = torch.randint(0, 61, shape).to(dtype)
    same = stored("Q6_K")[0].unpack({"blocks": blocks}, torch.empty(64, 512))
    assert torch.equal(packing.unpack({"blocks": blocks}, torch.empty(64, 512)), same)
    assert packing.stored_names("a.weight") == {"blocks": "a.gguf_q6_k"}
