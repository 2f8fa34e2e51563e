"""Products with 32 rows of a weight that stand together: of even steps, of tables, and of bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from offload.native.compiler import Compiled, compiled, has_wide_registers, is_available
from offload.native.run import product

pytestmark = pytest.mark.skipif(not is_available(), reason="no kernels can be compiled here")
ROWS, COLUMNS, GROUP = 96, 320, 64
NF4 = (-15684, -10919, -8235, -6194, -4461, -2898, -1428, 0, 1248, 2524, 3860, 5300, 6912, 8824, 11339, 15684)
FEW = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """Numbers in memory, what they mean in float64, and code: for an old processor, for this one with other tiles."""

    numbers: Tensor
    steps: Tensor
    group: int
    meant: Tensor
    codes: Sequence[Compiled]

    @property
    def record(self) -> tuple[int, ...]:
        return (self.numbers.data_ptr(), self.steps.data_ptr(), COLUMNS, ROWS, self.group)


def compiled_codes(module: Callable[..., object]) -> list[Compiled]:
    from offload.native.instructions import WIDE

    wide = [compiled(str(module((3, 1), width=WIDE)))] if has_wide_registers() else []
    return [compiled(str(module((2, 1))), cpu="haswell"), compiled(str(module((4, 1)))), *wide]


def in_lanes(numbers: Tensor) -> Tensor:
    """Return numbers uint8 [r, i] in the order that the module's docstring says: int16 lanes."""
    lanes = numbers.view(-1, 4, 8, numbers.shape[1] // 2, 2).permute(0, 3, 1, 2, 4).int()  # [B, i / 2, 4, 8, 2]
    return sum(lanes[:, :, place] << 4 * place for place in range(4)).to(torch.int16).contiguous()


def of_even_steps() -> Weight:
    from offload.native.lanes import lanes_module

    numbers = torch.randint(0, 16, (ROWS, COLUMNS), dtype=torch.uint8)
    steps = (torch.randn(COLUMNS // GROUP, ROWS, 2) * torch.tensor([0.02, 0.05])).bfloat16()
    scale, zero = steps.double().transpose(0, 1).repeat_interleave(GROUP, dim=1).unbind(-1)
    meant, codes = (numbers.double() - 8) * scale + zero, compiled_codes(lanes_module)
    return Weight(numbers=in_lanes(numbers), steps=by_unit(steps), group=GROUP, meant=meant, codes=codes)


def by_unit(steps: Tensor) -> Tensor:
    """Return steps [G, r, ...] of 32 rows after those of 32 others: [r / 32, G, 32, ...]."""
    return steps.unflatten(1, (-1, 32)).transpose(0, 1).contiguous()


def of_scales(*, in_half: bool) -> Weight:
    """Numbers whose zero is 8 in all groups."""
    from offload.native.lanes import lanes_module

    numbers = torch.randint(0, 16, (ROWS, COLUMNS), dtype=torch.uint8)
    scales = (torch.randn(COLUMNS // GROUP, ROWS) * 0.02).to(torch.float16 if in_half else torch.bfloat16)
    meant = (numbers.double() - 8) * scales.double().T.repeat_interleave(GROUP, dim=1)
    codes = compiled_codes(lambda tiles, **more: lanes_module(tiles, zeros="none", in_half=in_half, **more))
    return Weight(numbers=in_lanes(numbers), steps=by_unit(scales), group=GROUP, meant=meant, codes=codes)


def in_halves(numbers: Tensor) -> Tensor:
    """Return numbers uint8 [r, i] in bitsandbytes' order, as the module's docstring says: bytes."""
    pairs = numbers.view(-1, 2, 16, numbers.shape[1] // 2, 2).permute(0, 3, 1, 2, 4)  # [B, i / 2, half, 16, 2]
    return (pairs[:, :, 0] | pairs[:, :, 1] << 4).contiguous()


def of_table(values: Sequence[int], unit: int, group: int) -> Weight:
    from offload.native.tables import Table, tables_module

    table, columns = Table(values=tuple(values), unit=unit), min(group, 32)
    numbers = torch.randint(0, 16, (ROWS, COLUMNS), dtype=torch.uint8)
    scales = (torch.randn(COLUMNS // group, ROWS) * 0.02).bfloat16()
    scale = scales.double().T.repeat_interleave(group, dim=1)
    meant = torch.tensor(values).double()[numbers.int()] / unit * scale
    codes = compiled_codes(lambda tiles, **more: tables_module(table, tiles, columns=columns, **more))
    return Weight(numbers=in_halves(numbers), steps=scales, group=group, meant=meant, codes=codes)


def of_bytes(*, has_factors: bool) -> Weight:
    from offload.native.bytes import bytes_module

    columns = 32 if not has_factors else 256
    numbers = torch.randint(-128, 128, (ROWS, COLUMNS), dtype=torch.int8)
    numbers = numbers.clamp(-32, 31) if has_factors else numbers
    in_pairs = numbers.view(-1, 32, COLUMNS // 2, 2).transpose(1, 2).contiguous()
    steps = (torch.randn(-(-COLUMNS // columns), ROWS) * 0.02).half()
    scale = steps.double().T.repeat_interleave(columns, dim=1)[:, :COLUMNS]
    if has_factors:  # the last block of 256 columns is not whole
        factors = torch.randint(-127, 128, (len(steps), ROWS // 32, 16, 32), dtype=torch.int8)
        scale *= factors.permute(1, 3, 0, 2).reshape(ROWS, -1).repeat_interleave(16, dim=1)[:, :COLUMNS]
        both = (factors.flatten(2), steps.view(torch.int8).view(len(steps), -1, 64))
        steps = torch.cat(both, dim=-1).transpose(0, 1).contiguous()
    else:
        steps = by_unit(steps)
    codes = compiled_codes(lambda tiles, **more: bytes_module(tiles, has_factors=has_factors, **more))
    return Weight(numbers=in_pairs, steps=steps, group=columns, meant=numbers.double() * scale, codes=codes)


KINDS: dict[str, Callable[[], Weight]] = {
    "even steps": of_even_steps,
    "even steps, scales of float16": lambda: of_scales(in_half=True),
    "even steps, scales of bf16": lambda: of_scales(in_half=False),
    "nf4": lambda: of_table(NF4, 15684, 64),
    "nf4, scales of 16 columns": lambda: of_table(NF4, 15684, 16),
    "few values": lambda: of_table(FEW, 2, 32),
    "bytes": lambda: of_bytes(has_factors=False),
    "bytes with factors": lambda: of_bytes(has_factors=True),
    "few values, scales of 16 columns": lambda: of_table(FEW, 2, 16),
}


@pytest.fixture(scope="module", params=KINDS)
def weight(request: pytest.FixtureRequest) -> Weight:
    return KINDS[request.param]()


def test_products_are_those_of_the_weight(weight: Weight) -> None:
    rows = torch.randn(7, COLUMNS).bfloat16().float()
    right = rows.double() @ weight.meant.T
    for code in weight.codes:
        error = (product(code, weight.record, rows) - right).norm() / right.norm()
        assert float(error) < 2e-5


def test_each_number_has_its_own_place(weight: Weight) -> None:
    """Of one column each: no other number, and no neighbour's scale, may be seen."""
    rows = torch.eye(COLUMNS)
    for code in weight.codes:
        torch.testing.assert_close(product(code, weight.record, rows).double(), weight.meant.T, rtol=2e-7, atol=0)


def test_a_row_has_the_same_bits_in_any_company_and_on_any_processor(weight: Weight) -> None:
    rows = torch.randn(80, COLUMNS) * 10 ** torch.randn(80, 1)
    rows[::3] = rows[::3].sign()  # no sum may overflow
    whole = product(weight.codes[0], weight.record, rows)
    for code in weight.codes:
        assert torch.equal(product(code, weight.record, rows), whole)
        for first, last in pairwise((0, 1, 3, 6, 10, 15, 22, 80)):
            assert torch.equal(product(code, weight.record, rows[first:last]), whole[first:last])


def test_a_row_has_the_same_bits_with_any_number_of_threads(weight: Weight) -> None:
    """More than one has units, too: a weight has three."""
    rows, before = torch.randn(5, COLUMNS), torch.get_num_threads()
    whole = product(weight.codes[0], weight.record, rows)
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert all(torch.equal(product(code, weight.record, rows), whole) for code in weight.codes)
    finally:
        torch.set_num_threads(before)


def test_what_is_no_number_stays_in_its_row(weight: Weight) -> None:
    rows = torch.randn(3, COLUMNS)
    whole = product(weight.codes[0], weight.record, rows)
    rows[1, 5] = torch.inf
    for code in weight.codes:
        found = product(code, weight.record, rows)
        assert bool(found[1].isnan().all())
        assert torch.equal(found[::2], whole[::2])


def test_memory_may_begin_anywhere(weight: Weight) -> None:
    """As in a file, where nothing is aligned."""
    rows = torch.randn(3, COLUMNS)
    moved = torch.empty(weight.numbers.nbytes + 1, dtype=torch.uint8)[1:]
    moved.copy_(weight.numbers.view(torch.uint8).flatten())
    for code in weight.codes:
        found = product(code, (moved.data_ptr(), *weight.record[1:]), rows)
        assert torch.equal(found, product(code, weight.record, rows))


@pytest.mark.parametrize("has_factors", [False, True])
def test_no_block_divides(*, has_factors: bool) -> None:
    """A processor needs as long for a division as for the products of 32 columns with 32 rows."""
    from offload.native.bytes import bytes_module
    from offload.native.lanes import lanes_module

    for module in (
        bytes_module((2, 1), has_factors=has_factors),
        lanes_module((2, 1), zeros="any" if has_factors else "none"),
    ):
        for rows in (1, 2):
            assert "div" not in str(module.get_global(f"block_{rows}"))


@pytest.mark.parametrize("values", [NF4, FEW])
def test_the_largest_numbers_of_one_sign_do_not_overflow(values: Sequence[int]) -> None:
    weight = of_table([max(values, key=abs)] * 16, 1, 32)
    rows = torch.full((1, COLUMNS), 1.9999)
    for code in weight.codes:
        found = product(code, weight.record, rows).double()
        torch.testing.assert_close(found, rows.double() @ weight.meant.T, rtol=1e-4, atol=1e-4 * max(values))
