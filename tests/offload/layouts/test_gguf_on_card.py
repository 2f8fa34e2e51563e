"""A card's kernel for products with GGML's blocks, interpreted: its numbers are those of torch's unpacking."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor, nn

from offload.formats import gguf
from offload.formats.four_bits_kernel import works_on
from offload.formats.gguf_blocks import TYPES
from offload.formats.gguf_kernel import NAMES
from offload.layouts import gguf_blocks, gguf_on_card
from offload.layouts.gguf_on_card import COLUMNS_AT_ONCE, FEW_ROWS, few_rows, launch, product, sizes
from offload.layouts.known import kernel_of
from offload.packed_outside import PackedHead
from offload.packed_weight import PackedModule, PackedWeight
from tests.offload.layouts.test_gguf_blocks import expert_in_turn, stored
from tests.support.block_scales import HALVES
from tests.support.interpreted_triton import interpreted_triton
from tests.support.pretend_cuda import pretend_cuda

CPU, CARD, BF16 = torch.device("cpu"), torch.device("cuda", 0), torch.bfloat16
MOST = FEW_ROWS[0]
ROWS = 21  # of the weight: a program's, and some
COLUMNS = {"Q8_0": 800, "MXFP4": 416, "Q4_0": 1056}  # not all that are read together; 512 of other types


interpreted = pytest.fixture(scope="module")(interpreted_triton)


@pytest.fixture
def on_a_card() -> Iterator[None]:
    with pretend_cuda():
        yield


def matrix(name: str) -> tuple[Tensor, Tensor]:
    """Blocks of any bytes, whose scales are of many sizes and both signs, and their weights."""
    block, columns = TYPES[name], COLUMNS.get(name, 512)
    count = ROWS * columns // block.weights
    random = torch.Generator().manual_seed(len(name) + count)
    blocks = torch.randint(0, 256, (count, block.num_bytes), generator=random).to(torch.uint8)
    for start in HALVES[name]:
        scales = torch.randn(count, 1, generator=random).exp().mul(0.01).half()
        blocks[:, start : start + 2] = torch.where(blocks[:, start : start + 1] < 100, -scales, scales).view(
            torch.uint8
        )
    if name == "MXFP4":
        blocks[:, 0] = blocks[:, 0] % 7 + 118
    weight = torch.empty(count, block.weights)
    block.unpack(blocks, weight)
    return blocks.view(ROWS, -1), weight.view(ROWS, columns)


def activations(count: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    random = torch.Generator().manual_seed(count)
    return (torch.randn(count, columns, generator=random) * torch.randn(columns, generator=random).exp()).to(dtype)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_products_are_those_of_unpacked_weights_and_nothing_beside_them_is_written(
    name: str, dtype: torch.dtype
) -> None:
    """Within what the dtype rounds: of rows that fill no tile, behind which activations have no number."""
    blocks, weight = matrix(name)
    for count in (1, 18):
        given = activations(count + 1, weight.shape[1], dtype)
        given[count:] = torch.nan
        out = torch.full((count + 1, ROWS), 7.0, dtype=dtype)
        launch(name, blocks, given[:count], None, out[:count])
        exact, sizes_of = (
            given[:count].double() @ weight.double().T,
            given[:count].double().abs() @ weight.double().abs().T,
        )
        assert ((out[:count].double() - exact).abs() <= torch.finfo(dtype).eps * exact.abs() + 1e-6 * sizes_of).all()
        assert (out[count:] == 7).all()


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", NAMES)
def test_a_row_has_the_same_bits_alone_and_among_64(name: str) -> None:
    blocks, weight = matrix(name)
    given = activations(MOST, weight.shape[1])
    among = product(name, blocks, given, None)
    for row in (0, 1, 15, 16, 21, MOST - 1):
        assert torch.equal(product(name, blocks, given[row : row + 1], None), among[row : row + 1])
    for count in (2, 17, 33):
        assert torch.equal(product(name, blocks, given[:count], None), among[:count])


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", ["Q4_0", "Q8_0", "Q4_K", "Q6_K", "MXFP4"])
def test_columns_are_summed_from_the_first_to_the_last_and_groups_at_the_end(name: str) -> None:
    """By bits, of scales that are powers of two: another order of columns would be another text."""
    block, (blocks, weight) = TYPES[name], matrix(name)
    blocks = blocks.view(-1, block.num_bytes)
    for start, power in zip(HALVES[name], (2**-7, 0.0), strict=False):
        blocks[:, start : start + 2] = torch.tensor([power]).half().view(torch.uint8)
    first, last = {"Q4_K": (4, 16), "Q6_K": (192, 208)}.get(name, (0, 0))
    blocks[:, first:last] = 4  # as scales of groups
    block.unpack(blocks, weight.view(-1, block.weights))
    given, width = activations(3, weight.shape[1]), sizes(name)["width"]
    totals = torch.zeros(COLUMNS_AT_ONCE // width, len(given), ROWS)
    for group, (some, of_some) in enumerate(zip(given.split(width, 1), weight.split(width, 1), strict=True)):
        totals[group % len(totals)] += (some.double() @ of_some.double().T).float()
    expected = torch.zeros(len(given), ROWS)
    for total in totals:
        expected += total
    assert torch.equal(product(name, blocks.view(ROWS, -1), given, None), expected)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("form", ["rows", "heads", "several", "in turn"])
def test_rows_of_a_weight_are_read_where_they_lie(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of heads whose halves stand in turn, of two matrices one after the other, and of two whose rows are in turn."""
    monkeypatch.setattr(gguf_blocks, "few_rows", lambda *_: MOST)
    shape, bias = (64, 512), torch.randn(64)
    if form == "in turn":
        packing, blocks = expert_in_turn(shape)
        blocks[..., ::17] = 121  # exponents
        parts = {"MXFP4": blocks}
    else:
        packing, blocks = stored(
            "Q5_K", heads=4 if form == "heads" else 0, shape=(32, 512) if form == "several" else shape
        )
        parts = {"blocks": blocks}
        if form == "several":
            packing, parts = replace(packing, num_matrices=2), {"blocks": torch.stack((blocks, blocks.flip(0)))}
    weight, rows = packing.unpack(parts, torch.empty(shape)), activations(6, 512)
    kernel = gguf_blocks._kernel_on_card(packing, shape, torch.float32, CPU)
    found = kernel.multiply(parts, rows.view(2, 3, 512), bias)
    expected = (rows.double() @ weight.double().T + bias).float().view(2, 3, 64)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.usefixtures("interpreted")
def test_blocks_that_do_not_lie_at_multiples_of_their_words_are_copied_which_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    blocks, weight = matrix("Q4_K")
    moved = torch.zeros(blocks.numel() + 2, dtype=torch.uint8)[2:].view(blocks.shape).copy_(blocks)
    given = activations(2, weight.shape[1])
    gguf_on_card._say_where.cache_clear()
    with caplog.at_level(logging.WARNING, "edgespec.offload"):
        for _ in range(2):
            assert torch.equal(product("Q4_K", moved, given, None), product("Q4_K", blocks, given, None))
    assert [record.message for record in caplog.records] == [
        "blocks of Q4_K do not lie at multiples of their words: they are copied in each pass"
    ]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", NAMES)
def test_what_is_tried_on_a_card_is_right_of_each_type(name: str) -> None:
    assert gguf_on_card._is_right(name, CPU, torch.float16)


Launch = Callable[..., None]


def right(name: str, *given: Any, dtype: torch.dtype = torch.float32) -> None:
    """What the kernel computes, by torch, of weights in a dtype."""
    (blocks, rows, bias, out, *_), block = given, TYPES[name]
    weight = torch.empty(blocks.numel() // block.num_bytes, block.weights, device=blocks.device)
    block.unpack(blocks.view(-1, block.num_bytes), weight)
    exact = rows.double() @ weight.to(dtype).double().view(len(blocks), -1).T
    out.copy_(exact if bias is None else exact + bias.double())


def rounded_twice(*given: Any) -> None:
    """As unpacking does."""
    right(*given, dtype=BF16)


def seeing_company(*given: Any) -> None:
    right(*given)
    out = given[4]
    if len(out) == 1:
        out.view(torch.int16).bitwise_xor_(1)


def missing(*_: object) -> None:
    raise RuntimeError("no kernel image is available for execution on the device")


@pytest.mark.usefixtures("on_a_card")
@pytest.mark.parametrize("wrong", [rounded_twice, seeing_company, missing])
def test_a_kernel_is_used_where_the_card_computes_what_it_should(
    wrong: Launch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gguf_on_card, "launch", wrong)
    packing, _ = stored("Q4_K")
    for module, is_said in ((None, 0), ("found", 1)):
        monkeypatch.setattr(gguf_on_card, "find_spec", lambda _name, module=module: module)
        with caplog.at_level(logging.WARNING, "edgespec.offload"):
            assert [kernel_of(packing, (64, 512), BF16, CARD) for _ in range(2)] == [None, None]
        assert caplog.text.count("weights of Q4_K are unpacked in each pass") == is_said
    works_on.cache_clear()
    monkeypatch.setattr(gguf_on_card, "launch", right)
    assert kernel_of(packing, (64, 512), BF16, CARD).max_rows == MOST
    assert kernel_of(packing, (64, 512), torch.float32, CARD) is None
    assert kernel_of(packing, (2, 64, 512), BF16, CARD) is None


@pytest.mark.usefixtures("on_a_card")
@pytest.mark.parametrize("is_head", [False, True])
def test_few_rows_pass_a_module_as_its_weight_is_packed_and_more_with_it_unpacked(
    is_head: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a layer, whose parts may come anew for each pass, and of a head."""
    packing, blocks = stored("Q4_K")
    linear, packed = nn.Linear(512, 64, bias=False, device="meta"), PackedWeight((64, 512), packing)
    hooked = (PackedHead if is_head else PackedModule)(linear, [("weight", packed)])
    monkeypatch.setattr(gguf_on_card, "launch", right)
    weight = packing.unpack({"blocks": blocks}, torch.empty(64, 512, dtype=BF16))
    with ExitStack() as undo:
        hooked.hook(torch.empty(64 * 512, dtype=BF16).cuda(), undo)
        launched, unpacked = Mock(wraps=right), Mock(wraps=gguf.unpack_blocks)
        monkeypatch.setattr(gguf_on_card, "launch", launched)
        monkeypatch.setattr(gguf, "unpack_blocks", unpacked)
        for count, calls in ((MOST, (1, 0)), (1, (2, 0)), (MOST + 1, (2, 1))):
            packed._parameters["blocks"] = nn.Parameter(blocks.cuda(), requires_grad=False)
            rows = activations(count, 512, BF16)
            found = linear(rows.cuda()).cpu()
            assert (launched.call_count, unpacked.call_count) == calls
            torch.testing.assert_close(
                found, rows @ weight.T, rtol=0.03, atol=0.03 * float((rows @ weight.T).abs().max())
            )


@pytest.mark.usefixtures("on_a_card")
@pytest.mark.parametrize(("faster_to", "expected"), [(100, 64), (20, 16), (4, 0)])
def test_as_many_rows_are_few_as_the_kernel_is_faster_for(
    faster_to: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a kernel unpacks, too: beside torch's operations it always is."""
    monkeypatch.setattr(gguf_on_card, "TIMED_SHAPE", (32, 256))
    monkeypatch.setattr(gguf_on_card, "works_on", lambda *_: True)
    monkeypatch.setattr(gguf_on_card, "runs_on", lambda *_: True)
    monkeypatch.setattr(gguf_on_card, "unpack_on_card", lambda *_: True)
    monkeypatch.setattr(gguf_on_card, "launch", lambda *_: None)

    def seconds(multiply: Callable[[], Tensor]) -> float:
        is_as_packed = "blocks" in multiply.__code__.co_freevars
        return len(multiply()) if is_as_packed else faster_to

    monkeypatch.setattr(gguf_on_card, "fastest_s", seconds)
    assert few_rows("Q4_K", CARD, BF16) == expected


def test_no_rows_have_no_products() -> None:
    assert product("Q4_K", matrix("Q4_K")[0], torch.empty(2, 0, 512), None).shape == (2, 0, ROWS)


@pytest.mark.usefixtures("on_a_card")
def test_a_processor_other_types_and_a_card_that_is_only_planned_for_are_never_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gguf_on_card, "works_on", lambda *_: pytest.fail("a kernel is tried"))
    assert few_rows("Q4_K", CPU, BF16) == 0
    assert few_rows("IQ2_XS", CARD, BF16) == 0
    with patch("torch.cuda.device_count", lambda: 0):  # by `monkeypatch` it would outlast the pretended card
        assert few_rows("Q4_K", CARD, BF16) == 0
