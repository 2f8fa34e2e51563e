"""Numbers of four bits in the order of a card's kernel, which is pretended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from offload.allocated import allocated_bytes
from offload.layouts import int4
from offload.layouts.at_load import layout_at_load
from offload.layouts.int4 import GROUP_SIZES, Int4
from offload.layouts.int4_tiles import TILES, TileOrder
from offload.layouts.known import kernel_of
from tests.offload.formats import definitions
from tests.offload.formats.definitions import PUBLISHED
from tests.offload.formats.test_published import found_packing
from tests.offload.layouts.test_int4 import meant, packed, random_steps
from tests.support import pretend_cuda, pretend_int4

CARD = torch.device("cuda", 0)
SHAPE = (192, 512)


@pytest.fixture(autouse=True)
def card() -> Iterator[None]:
    with pretend_cuda.pretend_cuda():
        yield


def on_card(group_size: int, steps: tuple[Tensor, Tensor, Tensor]) -> tuple[Int4, dict[str, Tensor]]:
    packing = Int4(group_size=group_size, order=TILES)
    return packing, packing.parts_of(*(part.cuda() for part in steps))


def test_numbers_come_back() -> None:
    numbers = torch.randint(0, 16, SHAPE, dtype=torch.uint8).cuda()
    found = TILES.in_columns(TILES.packed(numbers), torch.empty(SHAPE[1], SHAPE[0], dtype=torch.uint8, device="cuda"))
    assert torch.equal(found.cpu(), numbers.cpu().T)


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("few", [0, 64])
def test_products_are_those_of_the_weights(group_size: int, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernel for few rows, which may be none, and by weights that are unpacked for many."""
    monkeypatch.setattr(int4, "rows_that_are_few", lambda *_: few)
    steps = random_steps(*SHAPE, group_size)
    packing, parts = on_card(group_size, steps)
    kernel = kernel_of(packing, SHAPE, torch.bfloat16, CARD)
    rows, bias = torch.randn(40, SHAPE[1]).bfloat16(), torch.randn(SHAPE[0]).bfloat16()
    exact = rows.double() @ meant(steps, group_size).T
    found = kernel.multiply(parts, rows.cuda(), None).cpu()
    of_bf16 = (rows @ meant(steps, group_size).bfloat16().T).double()
    assert (found.double() - exact).norm() <= 1.05 * (of_bf16 - exact).norm()
    assert torch.equal(kernel.multiply(parts, rows.cuda(), bias.cuda()).cpu(), found + bias)
    weight = packing.unpack(parts, torch.empty(SHAPE, dtype=torch.bfloat16, device="cuda")).cpu()
    _, on_host = packed(steps, group_size)
    assert torch.equal(weight, Int4(group_size=group_size).unpack(on_host, torch.empty(SHAPE)).bfloat16())


def test_a_row_has_the_same_bits_alone_and_among_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int4, "rows_that_are_few", lambda *_: 16)
    packing, parts = on_card(32, random_steps(*SHAPE, 32))
    kernel = kernel_of(packing, SHAPE, torch.bfloat16, CARD)
    rows = torch.randn(16, SHAPE[1]).bfloat16().cuda()
    whole = kernel.multiply(parts, rows, None).cpu()
    assert all(torch.equal(kernel.multiply(parts, rows[:count], None).cpu(), whole[:count]) for count in range(1, 17))


def test_the_order_of_a_tile_is_the_cards_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another release may have another: what the card packs is what is looked up."""
    turned = torch.randperm(pretend_int4.LANES.numel())
    pack, multiply = pretend_int4.in_tiles, pretend_int4.product
    operations = torch.ops.aten
    monkeypatch.setitem(
        pretend_cuda.KERNELS,
        operations._convert_weight_to_int4pack.default,
        lambda pairs, inner: pack(pairs, inner)[:, :, turned],
    )
    monkeypatch.setitem(
        pretend_cuda.KERNELS,
        operations._weight_int4pack_mm.default,
        lambda rows, words, *rest: multiply(rows, words[:, :, turned.argsort()], *rest),
    )
    assert TILES.runs_on(CARD)
    test_numbers_come_back()


def zeros_left_out(rows: Tensor, words: Tensor, group_size: int, steps: Tensor) -> Tensor:
    return pretend_int4.product(rows, words, group_size, torch.stack((steps[..., 0], steps[..., 1] * 0), dim=-1))


def rounded_among_others(rows: Tensor, *rest: object) -> Tensor:
    found = pretend_int4.product(rows, *rest)
    return found if len(rows) == 1 else found + found.abs() * 2**-8


def missing(*_: object) -> Tensor:
    raise RuntimeError("no kernel image is available for execution on the device")


@pytest.mark.parametrize("wrong", [zeros_left_out, rounded_among_others, missing])
def test_a_card_whose_kernel_computes_something_else_unpacks(
    wrong: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(pretend_cuda.KERNELS, torch.ops.aten._weight_int4pack_mm.default, wrong)
    assert not TILES.runs_on(CARD)
    assert kernel_of(Int4(order=TILES), SHAPE, torch.bfloat16, CARD) is None


def test_a_card_that_is_only_planned_for_is_taken_for_one_with_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TileOrder, "packed", lambda *_: pytest.fail("there is no card to pack on"))
    with patch("torch.cuda.device_count", lambda: 0):  # by `monkeypatch` it would outlast the pretended card
        assert kernel_of(Int4(order=TILES), SHAPE, torch.bfloat16, CARD) is not None


def test_a_card_has_no_kernel_for_other_numbers_or_few_columns() -> None:
    packing = Int4(order=TILES)
    assert kernel_of(packing, SHAPE, torch.float16, CARD) is None
    assert kernel_of(packing, SHAPE, torch.bfloat16, torch.device("cpu")) is None
    assert not packing.packs((64, 192))
    assert packing.packs((64, 256))


@pytest.mark.parametrize("form", ["gptq", "gptq-act-order", "awq", "compressed-int4-zeros"])
def test_the_numbers_of_a_form_take_the_place_of_those_that_are_stored(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a card needs memory for the steps alone, and made of some rows at a time it is the same."""
    monkeypatch.setattr(definitions, "GROUP", 64)
    monkeypatch.setattr("offload.formats.published.WEIGHTS_AT_ONCE_ON_GPU", 64 * SHAPE[1])
    packing, named = found_packing(PUBLISHED[form], PUBLISHED[form].parts(*SHAPE), SHAPE)
    weight = packing.unpack(named, torch.empty(SHAPE)).double()
    found = layout_at_load(packing, SHAPE, torch.bfloat16, CARD)
    stored = {name: part.cuda() for name, part in named.items()}
    parts = found.parts_on_card(stored)
    largest = max(stored.values(), key=lambda part: part.nbytes)
    assert parts["numbers"].inner.data_ptr() == largest.inner.data_ptr()
    added = [part for name, part in parts.items() if name != "numbers"]
    assert found.added_bytes_on_card == sum(allocated_bytes(part.nbytes) for part in added)
    rows = torch.randn(5, SHAPE[1]).bfloat16()
    exact = rows.double() @ weight.T
    product = found.kernel.multiply(parts, rows.cuda(), None).cpu().double()
    of_bf16 = (rows @ weight.bfloat16().T).double()
    # Scales and zeros are rounded to bf16, and weights once more: the kernel takes no other.
    assert (product - exact).norm() <= 1.35 * (of_bf16 - exact).norm()
    assert layout_at_load(packing, SHAPE, torch.float16, CARD) is None
