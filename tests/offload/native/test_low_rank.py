"""Rows get what two small matrices make of them, and each the same bits alone, in company and on any threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from offload.native.compiler import is_available

pytestmark = pytest.mark.skipif(not is_available(), reason="nothing can be compiled here")
NEAR = 1e-6  # of the largest sum


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def matrices(rank: int, columns: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(rank)
    down, up = torch.randn(rank, columns, generator=numbers), torch.randn(rows, rank, generator=numbers)
    return down, up, torch.randn(rows, generator=numbers)


def added(rows: Tensor, *parts: Tensor, scale: float = 0.7) -> Tensor:
    from offload.native.low_rank import LowRankWeight

    weight = LowRankWeight.of(parts[0], parts[1], parts[2] if len(parts) > 2 else None)
    found = torch.ones(len(rows), len(parts[1]))
    weight.add(rows, found, scale)
    return found


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rank", [1, 2, 7, 16])
def test_the_sum_is_that_of_both_products(rank: int, has_bias: bool) -> None:
    """Whole tiles of a rank and what is left of it, with the bias within the scale."""
    down, up, bias = matrices(rank, 48, 80)
    rows = torch.randn(9, 48)
    parts = (down, up, bias) if has_bias else (down, up)
    wanted = 1 + 0.7 * (rows.double() @ down.T.double() @ up.T.double() + (bias if has_bias else 0))
    assert (added(rows, *parts) - wanted).abs().max() < NEAR * wanted.abs().max()


@pytest.mark.usefixtures("threads")
def test_a_rows_bits_depend_on_no_other_row_and_no_thread() -> None:
    down, up, bias = matrices(7, 64, 32)
    rows = torch.randn(39, 64)
    torch.set_num_threads(1)
    whole = added(rows, down, up, bias)
    for start, end in ((0, 1), (1, 3), (3, 7), (7, 39)):
        assert torch.equal(added(rows[start:end], down, up, bias), whole[start:end])
    torch.set_num_threads(3)
    assert torch.equal(added(rows, down, up, bias), whole)


@pytest.mark.parametrize(("columns", "rows"), [(40, 32), (32, 40)])
def test_sizes_of_no_whole_registers_are_left_to_others(columns: int, rows: int) -> None:
    from offload.native.low_rank import LowRankWeight

    down, up, bias = matrices(4, columns, rows)
    assert LowRankWeight.of(down, up, bias) is None
