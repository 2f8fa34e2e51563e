"""Rows of activations as whole numbers of 15 bits."""

from __future__ import annotations

import ctypes
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from offload.native.compiler import Compiled, compiled, is_available
from offload.native.rounded_rows import COLUMNS, row_bytes

pytestmark = pytest.mark.skipif(not is_available(), reason="no kernels can be compiled here")


@pytest.fixture(scope="module")
def code() -> Compiled:
    from llvmlite import ir

    from offload.native.rounded_rows import add_rounding

    module = ir.Module("rounding")
    add_rounding(module).linkage = "external"
    return compiled(str(module), cpu="haswell")


def parts(code: Compiled, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the numbers [n, G, 32] as float64, and scales and sums [n, G]."""
    columns = rows.shape[1]
    found = torch.empty(len(rows), row_bytes(columns), dtype=torch.uint8)
    round_row = code.function("round_row", *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3)
    for row, place in zip(rows, found, strict=True):
        for first, last in pairwise((0, 1, columns // COLUMNS)):  # threads share the groups
            round_row(row.data_ptr(), place.data_ptr(), columns, first, last)
    numbers, scales, sums = found.split([2 * columns, columns // 8, columns // 8], dim=1)
    whole = numbers.contiguous().view(torch.int16).double().unflatten(1, (-1, COLUMNS))
    return whole, scales.contiguous().view(torch.float32), sums.contiguous().view(torch.float32)


def test_numbers_of_bf16_within_a_factor_of_64_stay_as_they_are(code: Compiled) -> None:
    size = 2.0 ** torch.randint(-60, 60, (50, 4, 1))
    rows = (torch.rand(50, 4, COLUMNS) * 63 + 1).bfloat16().float()
    rows = (rows / 64 * size * torch.randn(50, 4, COLUMNS).sign()).flatten(1)
    numbers, scales, sums = parts(code, rows)
    assert torch.equal((numbers * scales[..., None].double()).flatten(1), rows.double())
    assert torch.equal(sums.double(), rows.double().unflatten(1, (-1, COLUMNS)).sum(-1).float().double())


def test_others_are_off_by_a_small_part_of_the_largest_beside_them(code: Compiled) -> None:
    rows = torch.randn(50, 8 * COLUMNS) * 10 ** (4 * torch.randn(50, 8 * COLUMNS))
    numbers, scales, sums = parts(code, rows)
    groups = rows.double().unflatten(1, (-1, COLUMNS))
    most = groups.abs().amax(-1, keepdim=True)
    assert bool(((numbers * scales[..., None] - groups).abs() <= most * 2**-14).all())
    assert numbers.abs().max() <= 2**14
    assert torch.allclose(sums.double(), numbers.sum(-1) * scales, rtol=1e-6)


def test_zeros_the_smallest_and_the_largest_numbers_have_scales(code: Compiled) -> None:
    rows = torch.stack([torch.full((COLUMNS,), value) for value in (0.0, 1e-45, 2.0**-126, 3.4e38, -3.4028234e38)])
    numbers, scales, _ = parts(code, rows)
    back = (numbers * scales[..., None].double()).flatten(1)
    assert torch.equal(back[0], torch.zeros(COLUMNS).double())
    assert torch.allclose(back[2:], rows[2:].double(), rtol=2**-14, atol=0)
    assert bool(scales.isfinite().all())


@pytest.mark.parametrize("odd", [float("inf"), float("-inf"), float("nan")])
def test_infinity_and_what_is_no_number_make_all_products_no_number(code: Compiled, odd: float) -> None:
    rows = torch.randn(3, 4 * COLUMNS)
    rows[1, COLUMNS + 5] = odd
    numbers, scales, sums = parts(code, rows)
    for found in (scales, sums):
        assert found.isnan().nonzero().tolist() == [[1, 1]]
    assert bool((numbers[1, 1] == 0).all())
