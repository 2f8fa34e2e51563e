"""Whole numbers of four bits: packed, unpacked, and multiplied by torch's kernel as they are."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import NoReturn

import pytest
import torch

from offload.formats.bitsandbytes_4bit import NF4
from offload.formats.published import PublishedWeight
from offload.formats.storage import WEIGHTS_AT_ONCE, EvenSteps
from offload.layouts import int4, int4_lanes, onednn
from offload.layouts.int4 import (
    FEW_ROWS,
    GROUP_SIZES,
    INT4_LAYOUT,
    MIDDLE,
    Int4,
    Order,
    nearest_steps,
    rows_that_are_few,
)
from offload.layouts.int4_lanes import LANES, LaneOrder
from offload.layouts.int4_orders import NUM_ROWS, ORDERS, kernel_order, torch_order
from offload.layouts.known import kernel_of, storage_of
from tests.offload.formats import definitions
from tests.offload.formats.definitions import PUBLISHED
from tests.offload.formats.test_published import entry
from tests.offload.layouts.products import check_company_changes_no_bits, check_wrong_kernels_are_refused

CPU = torch.device("cpu")
needs_kernel = pytest.mark.skipif(kernel_order() is None, reason="torch has no such kernel for this processor")


Numbers = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def random_steps(rows: int, columns: int, group_size: int) -> Numbers:
    """Numbers [r, i], and a scale and a zero of each group [r, G]."""
    size = 10 ** -(torch.rand(rows, columns // group_size) * 4 + 2)  # some are too small for float16
    return (
        torch.randint(0, 16, (rows, columns), dtype=torch.uint8),
        ((torch.rand_like(size) + 0.1) * size).bfloat16().float(),
        (torch.randn_like(size) * size).bfloat16().float(),
    )


def meant(steps: Numbers, group_size: int) -> torch.Tensor:
    """The weight, from the format's definition."""
    scale, zero = (part.double().repeat_interleave(group_size, dim=-1) for part in steps[1:])
    return (steps[0].double() - MIDDLE) * scale + zero


def packed(steps: Numbers, group_size: int) -> tuple[Int4, dict[str, torch.Tensor]]:
    packing = Int4(group_size=group_size)
    return packing, packing.parts_of(*steps)


def test_no_kernel_is_compiled_to_know_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int4_lanes, "_is_right", lambda order: pytest.fail(f"{order} is tried"))
    assert Int4().order in ORDERS


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.name)
def test_numbers_come_back_from_every_order(order: Order) -> None:
    numbers = torch.randint(0, 16, (2 * NUM_ROWS, 32), dtype=torch.uint8)
    found = order.in_columns(order.packed(numbers), torch.empty(32, 2 * NUM_ROWS, dtype=torch.uint8))
    assert torch.equal(found, numbers.T)


@pytest.mark.parametrize("num_rows", [NUM_ROWS, 2 * NUM_ROWS])
def test_parts_lie_in_memory_as_they_do_in_files(num_rows: int) -> None:
    _, parts = Int4().pack(torch.randn(num_rows, 64))
    assert all(part.is_contiguous() for part in parts.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.name)
def test_unpacked_weights_are_those_that_the_format_defines(group_size: int, order: Order, dtype: torch.dtype) -> None:
    """Bit by bit: in float32, rounded once more where another dtype is needed."""
    steps = random_steps(NUM_ROWS * 3, 512, group_size)
    packing = Int4(group_size=group_size, order=order)
    out = packing.unpack(packing.parts_of(*steps), torch.empty(NUM_ROWS * 3, 512, dtype=dtype))
    assert torch.equal(out, meant(steps, group_size).float().to(dtype))


@pytest.mark.parametrize("has_columns", [False, True])
def test_large_weights_are_unpacked_some_rows_at_a_time(has_columns: bool) -> None:
    """The last time there are fewer rows; each of two matrices may have an order of columns of its own."""
    rows, columns = NUM_ROWS * 3, WEIGHTS_AT_ONCE // NUM_ROWS // 2
    steps = random_steps(2 * rows, columns, 256)
    numbers, scale, zero = (part.unflatten(0, (2, rows)) for part in steps)
    packing = Int4(group_size=256, has_columns=has_columns)
    orders = torch.stack([torch.randperm(columns), torch.randperm(columns)])
    parts = {**packing.parts_of(numbers, scale, zero), "columns": orders.int()}
    expected = meant(steps, 256).bfloat16().unflatten(0, (2, rows))
    if has_columns:
        expected = torch.stack([matrix[:, order.argsort()] for matrix, order in zip(expected, orders, strict=True)])
    assert torch.equal(packing.unpack(parts, torch.empty(2, rows, columns, dtype=torch.bfloat16)), expected)


def test_rounding_loses_no_more_than_half_a_step_of_each_group() -> None:
    weight = torch.randn(NUM_ROWS, 256) * 0.02
    steps = nearest_steps(weight, 32)
    loss = (meant(steps, 32) - weight).norm() / weight.norm()
    assert loss < 0.08  # bitsandbytes' nf4 with blocks of 64: 0.092
    inner = (steps[0] > 0) & (steps[0] < 15)
    half = steps[1].repeat_interleave(32, dim=-1) * 0.501
    assert bool(((meant(steps, 32) - weight).abs() <= half)[inner].all())


def test_a_group_of_equal_weights_keeps_them() -> None:
    weight = torch.full((NUM_ROWS, 64), 0.25)
    packing, parts = Int4().pack(weight)
    assert torch.equal(packing.unpack(parts, torch.empty_like(weight)), weight)


@needs_kernel
@pytest.mark.parametrize("num_rows", [9, 300])
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_products_are_as_near_as_those_of_bf16_weights(
    group_size: int, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of few rows, and those of many."""
    monkeypatch.setattr(int4, "rows_that_are_few", lambda *_: 16)
    steps = random_steps(NUM_ROWS * 2, 1024, group_size)
    packing, parts = packed(steps, group_size)
    kernel = kernel_of(packing, (NUM_ROWS * 2, 1024), torch.bfloat16, CPU)
    rows, bias = torch.randn(num_rows, 1024).bfloat16(), torch.randn(NUM_ROWS * 2).bfloat16()
    exact = rows.double() @ meant(steps, group_size).T
    error = (kernel.multiply(parts, rows, None).double() - exact).norm() / exact.norm()
    of_bf16 = ((rows @ meant(steps, group_size).bfloat16().T).double() - exact).norm() / exact.norm()
    assert error <= of_bf16 * 1.05
    with_bias = kernel.multiply(parts, rows.view(3, num_rows // 3, -1), bias)
    assert torch.equal(with_bias, (kernel.multiply(parts, rows, None) + bias).view(3, num_rows // 3, -1))


@needs_kernel
def test_many_rows_are_multiplied_with_unpacked_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the columns have an order of their own, and where not all rows are unpacked at once."""
    rows, columns = NUM_ROWS * 3, WEIGHTS_AT_ONCE // NUM_ROWS // 2
    packing = Int4(group_size=256, has_columns=True)
    order = torch.randperm(columns, dtype=torch.int32)
    parts = {**packing.parts_of(*random_steps(rows, columns, 256)), "columns": order}
    weight = packing.unpack(parts, torch.empty(rows, columns, dtype=torch.bfloat16))
    monkeypatch.setattr(int4, "rows_that_are_few", lambda *_: 5)
    monkeypatch.setattr(Int4, "multiply_packed", lambda *_: pytest.fail("these rows are many"))
    kernel = kernel_of(packing, (rows, columns), torch.bfloat16, CPU)
    inputs = torch.randn(6, columns).bfloat16()
    product = kernel.multiply(parts, inputs, None).float()
    torch.testing.assert_close(product, inputs.float() @ weight.float().T, rtol=0.01, atol=0.05)


@needs_kernel
def test_rows_of_a_large_tree_have_the_bits_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int4, "rows_that_are_few", lambda *_: 16)
    packing, parts = packed(random_steps(NUM_ROWS * 2, 1024, 32), 32)
    kernel = kernel_of(packing, (NUM_ROWS * 2, 1024), torch.bfloat16, CPU)
    check_company_changes_no_bits(lambda some: kernel.multiply(parts, some, None), torch.randn(40, 1024).bfloat16())


@pytest.mark.parametrize("has_bf16", [False, True])
def test_processors_without_bf16_multiply_many_rows_in_float32(has_bf16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By weights that are not rounded to bf16, as the kernel's own are not."""
    monkeypatch.setattr(onednn, "has_onednn", lambda dtype: has_bf16 or dtype == torch.float32)
    packing, parts = packed(random_steps(NUM_ROWS, 512, 32), 32)
    dtype = torch.bfloat16 if has_bf16 else torch.float32
    weight, rows = packing.unpack(parts, torch.empty(NUM_ROWS, 512, dtype=dtype)), torch.randn(100, 512).bfloat16()
    product = packing.multiply_unpacked(parts, rows)
    assert torch.equal(product, (rows.to(dtype) @ weight.T.contiguous()).bfloat16())


@needs_kernel
def test_what_is_few_is_one_of_a_few_numbers() -> None:
    """They are far apart, so that two starts on one machine choose the same."""
    assert rows_that_are_few(Int4().order, CPU) in (*FEW_ROWS["cpu"], sys.maxsize)


@pytest.mark.parametrize("rows", [NUM_ROWS // 2, NUM_ROWS])
@pytest.mark.parametrize("form", ["gptq", "gptq-act-order", "awq"])
def test_matrices_of_experts_are_kept_side_by_side(form: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The halves of three experts' in one parameter; each half may have columns in an order of its own."""
    monkeypatch.setattr(definitions, "GROUP", 32)
    made, shape = [PUBLISHED[form].parts(rows, 96) for _ in range(6)], (3, 2 * rows, 96)
    pieces = {f"e.{leaf}": tuple(entry(f"{i}.{leaf}", parts[leaf]) for i, parts in enumerate(made)) for leaf in made[0]}
    found = storage_of("e", shape, pieces, PUBLISHED[form].stated)
    assert found is not None
    kept = INT4_LAYOUT.repacked(found, shape, None)
    if form == "gptq-act-order":
        assert kept is None
        return
    named = found.stored_names("e")
    stored = {part: torch.stack([parts[name.removeprefix("e.")] for parts in made]) for part, name in named.items()}
    repacked = kept.repack("e", stored)
    assert {name: (tuple(part.shape), part.dtype) for name, part in repacked.items()} == kept.storage.part_shapes(shape)
    expected = torch.cat([PUBLISHED[form].meaning(parts, rows, 96) for parts in made]).view(shape).double()
    again = kept.storage.unpack(repacked, torch.empty(shape)).double()
    assert (again - expected).norm() / expected.norm() < 0.004


def test_numbers_that_the_kernel_does_not_know_are_not_kept() -> None:
    def unread(*_parts: object) -> NoReturn:
        pytest.fail("nothing is read")

    for bits, num_groups in ((8, 4), (4, 8), (4, 1)):  # of 128 columns: groups of 32, 16 and 128
        steps = EvenSteps(
            num_matrices=1,
            bits=bits,
            num_groups=num_groups,
            in_order=True,
            read=unread,
        )
        found = PublishedWeight(name="gptq", num_matrices=1, parts={}, unpack_rows=unread, even_steps=steps)
        assert (INT4_LAYOUT.repacked(found, (NUM_ROWS, 128), None) is not None) == ((bits, num_groups) == (4, 1))
        assert INT4_LAYOUT.repacked(found, (NUM_ROWS - 1, 128), None) is None
    assert INT4_LAYOUT.repacked(NF4, (NUM_ROWS, 128), None) is None


@needs_kernel
def test_a_kernel_is_given_numbers_in_its_own_order_alone() -> None:
    """Torch's of one kind of processor, and ours of any."""
    shape = (NUM_ROWS, 64)
    for order in ORDERS:
        has_kernel = order == torch_order() or (order == LANES and LANES.runs_on(CPU))
        for dtype in (torch.bfloat16, torch.float32):
            found = kernel_of(Int4(order=order), shape, dtype, CPU)
            assert (found is not None) == (has_kernel and dtype in order.dtypes)
        assert kernel_of(Int4(order=order), shape, torch.bfloat16, torch.device("cuda")) is None


@pytest.mark.skipif(not LANES.runs_on(CPU), reason="no kernels can be compiled here")
def test_kernels_that_are_compiled_here_are_preferred_and_take_any_number_of_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert kernel_order() == LANES
    assert rows_that_are_few(LANES, CPU) == sys.maxsize
    monkeypatch.setattr(int4_lanes, "is_available", lambda: False)
    assert kernel_order() == torch_order()


@pytest.mark.skipif(not LANES.runs_on(CPU), reason="no kernels can be compiled here")
def test_kernels_whose_products_are_wrong_are_not_used() -> None:
    right = LaneOrder.product

    def exchanged(patched: pytest.MonkeyPatch) -> None:
        patched.setattr(
            LaneOrder,
            "product",
            lambda own, rows, packed, *of, **more: right(own, rows, packed << 4 | packed >> 4, *of, **more),
        )

    check_wrong_kernels_are_refused(int4_lanes, lambda: LANES.runs_on(CPU), exchanged)


@pytest.mark.skipif(not LANES.runs_on(CPU), reason="no kernels can be compiled here")
def test_rows_have_the_same_bits_with_any_number_of_threads() -> None:
    packing, parts = packed(random_steps(NUM_ROWS * 2, 1024, 32), 32)
    before = torch.get_num_threads()
    for dtype in (torch.bfloat16, torch.float32):
        rows, found = torch.randn(80, 1024).to(dtype), []
        try:
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                found += [packing.multiply_packed(parts, rows), packing.multiply_packed(parts, rows[7:8])]
        finally:
            torch.set_num_threads(before)
        assert all(torch.equal(one, found[0]) for one in found[::2])
        assert all(torch.equal(one, found[0][7:8]) for one in found[1::2])


@pytest.mark.skipif(not LANES.runs_on(CPU), reason="no kernels can be compiled here")
def test_products_of_both_dtypes_are_rounded_once() -> None:
    packing, parts = packed(random_steps(NUM_ROWS * 2, 1024, 32), 32)
    rows = torch.randn(80, 1024).bfloat16()
    rows[3] *= 1e38
    rows[5, 7] = torch.inf
    found = packing.multiply_packed(parts, rows)
    wide = packing.multiply_packed(parts, rows.float())
    assert torch.equal(found.nan_to_num(), wide.bfloat16().nan_to_num())
    assert found[5].isnan().all()
    assert not found[6].isnan().any()


@pytest.mark.skipif(not LANES.runs_on(CPU), reason="no kernels can be compiled here")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_scales_that_stand_alone_give_the_bits_of_those_with_zeros_of_nothing(dtype: torch.dtype) -> None:
    """And files say which they are: two bytes a group, whose names are others."""
    numbers, scale, zero = random_steps(NUM_ROWS * 2, 1024, 32)
    scale = scale.half().bfloat16().float()  # both dtypes hold it
    alone, with_zeros = Int4(order=replace(LANES, scales=dtype)), Int4()
    parts, expected = (packing.parts_of(numbers, scale, 0 * zero) for packing in (alone, with_zeros))
    assert {name: (tuple(part.shape), part.dtype) for name, part in parts.items()} == alone.part_shapes(numbers.shape)
    rows = torch.randn(80, 1024)
    assert torch.equal(alone.multiply_packed(parts, rows), with_zeros.multiply_packed(expected, rows))
    for kind in (torch.float32, torch.bfloat16):
        out = alone.unpack(parts, torch.empty(NUM_ROWS * 2, 1024, dtype=kind))
        assert torch.equal(out, meant((numbers, scale, 0 * zero), 32).float().to(kind))
    pieces = {name: (entry(name, parts[part]),) for part, name in alone.stored_names("p").items()}
    assert storage_of("p", tuple(numbers.shape), pieces, {}) == alone


@pytest.mark.skipif(not LANES.runs_on(CPU), reason="no kernels can be compiled here")
@pytest.mark.parametrize("scales", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", ["gptq", "gptq-act-order", "awq", "compressed-int4-zeros", "compressed-int4"])
def test_published_weights_of_whole_zeros_are_kept_as_they_are(
    form: str, scales: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each weight, in bf16 and float32, and products with them; files say that they are such."""
    monkeypatch.setattr(definitions, "GROUP", 32)
    shape, rows = (NUM_ROWS * 2, 1024), torch.randn(80, 1024)
    made = PUBLISHED[form].parts(*shape)
    name = "weight_scale" if "weight_scale" in made else "scales"
    made[name] = made[name].to(scales)
    found = storage_of("p.weight", shape, {f"p.{leaf}": (entry(leaf, part),) for leaf, part in made.items()},
                       PUBLISHED[form].stated)  # fmt: skip
    stored = {part: made[stored.removeprefix("p.")] for part, stored in found.stored_names("p.weight").items()}
    kept = INT4_LAYOUT.repacked(found, shape, CPU)
    assert isinstance(kept.storage, Int4)
    assert (kept.storage.scales, kept.storage.has_whole_zeros) == (scales, form != "compressed-int4")
    parts = kept.repack("p.weight", stored)
    assert {part: (tuple(own.shape), own.dtype) for part, own in parts.items()} == kept.storage.part_shapes(shape)
    expected = PUBLISHED[form].meaning(made, *shape)
    for kind in (torch.float32, torch.bfloat16):
        assert torch.equal(kept.storage.unpack(parts, torch.empty(shape, dtype=kind)), expected.to(kind))
    kernel = kernel_of(kept.storage, shape, torch.float32, CPU)
    product, exact = kernel.multiply(parts, rows, None).double(), rows.double() @ expected.double().T
    assert float((product - exact).norm() / exact.norm()) < 1e-4
    pieces = {own: (entry(own, parts[part]),) for part, own in kept.storage.stored_names("p").items()}
    assert storage_of("p", shape, pieces, {}) == kept.storage


@pytest.mark.skipif(not LANES.runs_on(CPU), reason="no kernels can be compiled here")
def test_published_scales_are_kept_alone_where_no_group_has_a_zero() -> None:
    """A card's order and torch's have zeros."""
    steps = EvenSteps(
        num_matrices=1, bits=4, num_groups=4, in_order=True, scales=torch.float16, is_middle=True,
        read=lambda _: pytest.fail("unread"),
    )  # fmt: skip
    found = PublishedWeight(name="Q4_0", num_matrices=1, parts={}, unpack_rows=lambda *_: None, even_steps=steps)
    shape = (NUM_ROWS, 128)
    for device, given, expected in (
        (None, steps, torch.float16), (CPU, steps, torch.float16), (CPU, replace(steps, scales=None), None),
        (torch.device("cuda"), steps, None),
    ):  # fmt: skip
        kept = INT4_LAYOUT.repacked(replace(found, even_steps=given), shape, device)
        assert isinstance(kept.storage, Int4)
        assert (kept.storage.scales, kept.storage.has_whole_zeros) == (expected, False)


@pytest.mark.skipif(not LANES.runs_on(CPU), reason="no kernels can be compiled here")
@pytest.mark.parametrize("order", [
    LANES, *(replace(LANES, scales=scales) for scales in (torch.float16, torch.bfloat16)),
    *(replace(LANES, scales=scales, has_whole_zeros=True) for scales in (torch.float16, torch.bfloat16)),
], ids=str)  # fmt: skip
def test_kernels_of_other_steps_are_not_used(order: LaneOrder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a zero that is another number, and of a neighbour's scales, or steps."""
    from offload.native import lanes, row_blocks

    alone, both = row_blocks.scales_at, lanes._steps
    is_alone = order.scales is not None and not order.has_whole_zeros
    faults: list[tuple[str, object]] = [("MIDDLE", 7.0)] if not order.has_whole_zeros else []
    if is_alone:
        faults.append(("scales_at", lambda code, at, first, *of, **more: alone(code, at, first ^ 1, *of, **more)))
    else:
        faults.append(("_steps", lambda code, at, *of, **more: both(code, code.at(at, 4), *of, **more)))
    try:
        for name, wrong in faults:
            int4_lanes._is_right.cache_clear()
            int4_lanes._code.cache_clear()
            with monkeypatch.context() as patched:
                patched.setattr(lanes, name, wrong)
                assert not order.runs_on(CPU), name
    finally:
        int4_lanes._is_right.cache_clear()
        int4_lanes._code.cache_clear()


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="one processor with several orders")
def test_the_order_of_another_kind_of_processor_is_found() -> None:
    command = "from offload.layouts.int4_orders import torch_order; print(torch_order().name)"
    found = {
        capability: subprocess.run(
            [sys.executable, "-c", command], env={**os.environ, "ATEN_CPU_CAPABILITY": capability},
            capture_output=True, text=True, check=True,
        ).stdout.strip()
        for capability in ("avx2", "default")
    }  # fmt: skip
    assert found == {"avx2": "halves32", "default": "pairs32"}
    assert torch_order().name == "halves64"
