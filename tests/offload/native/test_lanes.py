"""Products with whole numbers of four bits in lanes."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from offload.native.compiler import Compiled, compiled, has_wide_registers, is_available
from offload.native.run import product

pytestmark = pytest.mark.skipif(not is_available(), reason="no kernels can be compiled here")
ROWS, COLUMNS, GROUP = 96, 320, 64


@pytest.fixture(scope="module")
def codes() -> list[Compiled]:
    """For an old processor, for this one with other tiles, and with its wide registers."""
    from offload.native.lanes import WIDE, lanes_module

    wide = [compiled(str(lanes_module((3, 1), width=WIDE)))] if has_wide_registers() else []
    return [compiled(str(lanes_module((2, 1))), cpu="haswell"), compiled(str(lanes_module((4, 1)))), *wide]


def in_lanes(numbers: Tensor) -> Tensor:
    """Return numbers uint8 [r, i] in the order that the module's docstring says: int16 lanes."""
    lanes = numbers.view(-1, 4, 8, numbers.shape[1] // 2, 2).permute(0, 3, 1, 2, 4).int()  # [B, i / 2, 4, 8, 2]
    words = sum(lanes[:, :, place] << 4 * place for place in range(4))
    assert isinstance(words, Tensor)
    return words.to(torch.int16).contiguous()


class Weight:
    def __init__(self) -> None:
        numbers = torch.randint(0, 16, (ROWS, COLUMNS), dtype=torch.uint8)
        self.steps = (torch.randn(COLUMNS // GROUP, ROWS, 2) * torch.tensor([0.02, 0.05])).bfloat16()
        self.numbers = in_lanes(numbers)
        scale, zero = self.steps.double().transpose(0, 1).repeat_interleave(GROUP, dim=1).unbind(-1)
        self.meant = (numbers.double() - 8) * scale + zero
        self.record = (self.numbers.data_ptr(), self.steps.data_ptr(), COLUMNS, ROWS, GROUP)


@pytest.fixture(scope="module")
def weight() -> Weight:
    return Weight()


def test_products_are_those_of_the_weight(codes: list[Compiled], weight: Weight) -> None:
    rows = torch.randn(7, COLUMNS).bfloat16().float()
    right = rows.double() @ weight.meant.T
    for code in codes:
        error = (product(code, weight.record, rows) - right).norm() / right.norm()
        assert float(error) < 2e-5


def test_each_number_has_its_own_place(codes: list[Compiled], weight: Weight) -> None:
    """Of one column each: no other number, and no neighbour's scale, may be seen."""
    rows = torch.eye(COLUMNS)
    for code in codes:
        assert torch.equal(product(code, weight.record, rows).double(), weight.meant.T.float().double())


def test_a_row_has_the_same_bits_in_any_company_and_on_any_processor(codes: list[Compiled], weight: Weight) -> None:
    rows = torch.randn(80, COLUMNS) * 10 ** torch.randn(80, 1)
    whole = product(codes[0], weight.record, rows)
    for code in codes:
        assert torch.equal(product(code, weight.record, rows), whole)
        for first, last in pairwise((0, 1, 3, 6, 10, 15, 22, 80)):
            assert torch.equal(product(code, weight.record, rows[first:last]), whole[first:last])


def test_a_row_has_the_same_bits_with_any_number_of_threads(codes: list[Compiled], weight: Weight) -> None:
    """More than one has units, too: a weight has three."""
    rows, before = torch.randn(5, COLUMNS), torch.get_num_threads()
    whole = product(codes[0], weight.record, rows)
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert all(torch.equal(product(code, weight.record, rows), whole) for code in codes)
    finally:
        torch.set_num_threads(before)


def test_what_is_no_number_stays_in_its_row(codes: list[Compiled], weight: Weight) -> None:
    rows = torch.randn(3, COLUMNS)
    whole = product(codes[0], weight.record, rows)
    rows[1, 5] = torch.inf
    for code in codes:
        found = product(code, weight.record, rows)
        assert bool(found[1].isnan().all())
        assert torch.equal(found[::2], whole[::2])


def test_memory_may_begin_anywhere(codes: list[Compiled], weight: Weight) -> None:
    """As in a file, where nothing is aligned."""
    rows = torch.randn(3, COLUMNS)
    moved = torch.empty(weight.numbers.nbytes + 1, dtype=torch.uint8)[1:]
    moved.copy_(weight.numbers.view(torch.uint8).flatten())
    for code in codes:
        found = product(code, (moved.data_ptr(), *weight.record[1:]), rows)
        assert torch.equal(found, product(code, weight.record, rows))
