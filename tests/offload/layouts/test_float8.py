"""Numbers of float8 are multiplied as they are published."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from offload.formats.published import PublishedWeight
from offload.formats.scaled import FP8
from offload.formats.storage import StoredParameter
from offload.layouts import float8
from offload.layouts.float8 import FLOAT8, Float8, native
from offload.layouts.known import kernel_of
from offload.native.compiler import compiled, has_wide_registers, is_available
from offload.native.run import product
from tests.offload.formats.test_published import entry
from tests.offload.layouts.products import check_products, check_wrong_kernels_are_refused

CPU, BF16 = torch.device("cpu"), torch.bfloat16
SHAPE = (96, 320)
pytestmark = pytest.mark.skipif(not is_available(), reason="no kernels can be compiled here")
# Scales of blocks, of which the last are not whole, of rows, and of the matrix
SCALES = {"blocks": (3, 5), "of rows": (96, 1), "of the matrix": ()}
STATED = {"quant_method": "fp8", "weight_block_size": [40, 64]}


def stored(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[PublishedWeight, dict[str, Tensor]]:
    """A matrix of all numbers that are some, with scales of both signs, and its float64 weight."""
    bits = torch.randint(0, 256, SHAPE).to(torch.uint8)
    numbers = torch.where(bits & 127 == 127, 0, bits).view(torch.float8_e4m3fn).to(dtype)
    parts = {"numbers": numbers, "scale": torch.randn(shape)}
    leaves = {"w.weight": (entry("w.weight", numbers),), "w.weight_scale_inv": (entry("s", parts["scale"]),)}
    packing = FP8.detect(StoredParameter(name="w.weight", shape=SHAPE, stored=leaves, stated=STATED))
    assert isinstance(packing, PublishedWeight)
    return packing, parts


@pytest.mark.parametrize("shape", SCALES.values(), ids=SCALES)
def test_products_are_exact_but_for_sums_and_a_row_has_its_bits_in_any_company(shape: tuple[int, ...]) -> None:
    packing, parts = stored(shape)
    weight = packing.unpack(parts, torch.empty(SHAPE)).double()
    rows = torch.randn(81, SHAPE[1]).bfloat16()
    for dtype, most in ((BF16, 0.002), (torch.float32, 5e-7)):
        kernel, _ = check_products(kernel_of(packing, SHAPE, dtype, CPU), parts, rows.to(dtype), weight, most=most)
        native = kernel.native(parts)
        assert (native.rows, native.columns, native.takes_rounded) == (*SHAPE, False)


@pytest.mark.parametrize("shape", SCALES.values(), ids=SCALES)
def test_each_number_has_its_own_place_and_scale(shape: tuple[int, ...]) -> None:
    packing, parts = stored(shape)
    weight = packing.unpack(parts, torch.empty(SHAPE))
    kernel = kernel_of(packing, SHAPE, torch.float32, CPU)
    assert torch.equal(kernel.multiply(parts, torch.eye(SHAPE[1]), None), weight.T)


def test_what_is_no_number_stays_none() -> None:
    packing, parts = stored(())
    kernel = kernel_of(packing, SHAPE, torch.float32, CPU)
    parts["numbers"].view(torch.uint8)[5, 7] = 0x7F
    parts["numbers"].view(torch.uint8)[6, 7] = 0xFF
    found = kernel.multiply(parts, torch.randn(2, SHAPE[1]), None)
    assert found.isnan().nonzero().tolist() == [[0, 5], [0, 6], [1, 5], [1, 6]]


def test_bits_are_those_of_other_tiles_threads_and_processors() -> None:
    from offload.native.float8 import float8_module

    _, parts = stored((3, 5))
    record = (parts["numbers"].data_ptr(), parts["scale"].data_ptr(), SHAPE[1], SHAPE[0], 40, 64, 5)
    rows, before = torch.randn(80, SHAPE[1]), torch.get_num_threads()
    codes = [compiled(str(float8_module({2: 2, 1: 4})), cpu="haswell")]
    codes += [compiled(str(float8_module({4: 4, 1: 4})))] if has_wide_registers() else []
    whole = product(codes[0], record, rows)
    try:
        for code in codes:
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                for first, last in pairwise((0, 1, 3, 6, 15, 80)):
                    assert torch.equal(product(code, record, rows[first:last]), whole[first:last])
    finally:
        torch.set_num_threads(before)


def test_what_it_does_not_know_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    packing, _ = stored((3, 5))
    assert kernel_of(packing, SHAPE, BF16, torch.device("cuda")) is None
    assert kernel_of(packing, SHAPE, torch.float16, CPU) is None
    assert kernel_of(replace(packing, is_transposed=True), SHAPE, BF16, CPU) is None
    assert kernel_of(replace(packing, num_matrices=2), (2, *SHAPE), BF16, CPU) is None
    assert kernel_of(packing, (95, 320), BF16, CPU) is None
    assert kernel_of(replace(packing, scale_block=(40, 60)), SHAPE, BF16, CPU) is None
    assert kernel_of(stored((3, 5), torch.float8_e5m2)[0], SHAPE, BF16, CPU) is None
    monkeypatch.setattr(float8, "is_available", lambda: False)
    assert kernel_of(packing, SHAPE, BF16, CPU) is None


def test_a_kernel_whose_products_are_wrong_is_not_used() -> None:
    packing = stored((3, 5))[0]

    def other_blocks(patched: pytest.MonkeyPatch) -> None:
        def flipped(block: tuple[int, int], shape: tuple[int, int], parts: Mapping[str, Tensor]) -> Any:
            return native(block, shape, {**parts, "scale": parts["scale"].flip(0)})

        patched.setattr(float8, "native", flipped)

    check_wrong_kernels_are_refused(float8, lambda: kernel_of(packing, SHAPE, BF16, CPU) is not None, other_blocks)


def test_a_sample_of_any_shape_measures_its_speed() -> None:
    packing, parts = stored((3, 5))
    own = replace(Float8(), block=(40, 64))
    assert {name: (tuple(part.shape), part.dtype) for name, part in parts.items()} == own.part_shapes(SHAPE)
    assert torch.equal(own.unpack(parts, torch.empty(SHAPE)), packing.unpack(parts, torch.empty(SHAPE)))
    assert FLOAT8.kernel(own, SHAPE, BF16, CPU) is not None
