"""Numbers of five to eight bits, and those of FP4, are kept as sums of two terms, which one product multiplies."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from offload.formats.fp4 import FP4_NUMBERS
from offload.formats.published import PublishedWeight
from offload.formats.storage import EvenSteps, StoredParameter
from offload.layouts import nf4_cpu, table_kernels
from offload.layouts.int4 import Int4
from offload.layouts.int4_lanes import LANES
from offload.layouts.int4_orders import ORDERS, kernel_order, torch_order
from offload.layouts.known import kernel_of, storage_of
from offload.layouts.layout import LosslessLayout
from offload.layouts.nf4_cpu import kernel_is_there
from offload.layouts.transposed import Transposed, detect_transposed
from offload.layouts.two_terms import FP4_TWICE, FP4_TWICE_LAYOUT, INT4_TWICE, INT4_TWICE_LAYOUT
from tests.offload.formats.test_published import entry

CPU = torch.device("cpu")
SHAPE = (128, 96)
needs_fp4 = pytest.mark.skipif(not kernel_is_there(), reason="a processor without AVX512-BF16")
needs_int4 = pytest.mark.skipif(kernel_order() is None, reason="torch has no kernel for this processor")
LAYOUTS = [
    pytest.param(FP4_TWICE_LAYOUT, marks=needs_fp4, id="fp4"),
    pytest.param(INT4_TWICE_LAYOUT, marks=needs_int4, id="int4"),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_of_gpt_oss_are_kept_by_rows_of_their_transposed(layout: LosslessLayout) -> None:
    """Each expert's parts are its own, and what is stored is found again by its names."""
    experts, columns, rows = 3, 64, 128
    blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16)).to(torch.uint8)
    scale = torch.randint(100, 140, (experts, rows, columns // 32)).to(torch.uint8)
    shape, stored = (experts, columns, rows), {"packed": blocks, "scale": scale}
    pieces = {"e_blocks": (entry("e_blocks", blocks),), "e_scales": (entry("e_scales", scale),)}
    found = storage_of("e", shape, pieces, {"quant_method": "mxfp4"})
    assert found.transposed is not None
    expected = found.unpack(stored, torch.empty(shape))
    kept = layout.repacked(found.transposed, (experts, rows, columns), None)
    packing, parts = Transposed(transposed=kept.storage), kept.repack("e", stored)
    assert torch.equal(packing.unpack(parts, torch.empty(shape)), expected)
    names = packing.stored_names("e")
    assert storage_of("e", shape, {name: (entry(name, parts[part]),) for part, name in names.items()}, {}) == packing
    share = packing.of_share(shape, experts)
    of_one = {part: tensor[1:2] for part, tensor in parts.items()}
    assert torch.equal(share.transposed.unpack(of_one, torch.empty(1, rows, columns)), expected[1:2].mT)


def steps_of(bits: int, *, in_order: bool = True, numbers: frozenset[int] | None = None) -> PublishedWeight:
    def unread(*_: object) -> None:
        raise AssertionError

    steps = EvenSteps(
        num_matrices=1,
        bits=bits,
        num_groups=3,
        in_order=in_order,
        read=unread,
        numbers=numbers,
    )
    return PublishedWeight(name="a", num_matrices=1, parts={}, unpack_rows=unread, even_steps=steps)


@needs_fp4
def test_what_is_no_such_sum_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    halves = frozenset(int(2 * number) for number in FP4_NUMBERS)
    assert FP4_TWICE_LAYOUT.repacked(steps_of(5, numbers=halves), SHAPE, None) is not None
    assert FP4_TWICE_LAYOUT.repacked(steps_of(5, numbers=halves | {5}), SHAPE, None) is None
    assert FP4_TWICE_LAYOUT.repacked(steps_of(5), SHAPE, None) is None
    assert INT4_TWICE_LAYOUT.repacked(steps_of(5, numbers=halves), SHAPE, None) is not None
    assert INT4_TWICE_LAYOUT.repacked(steps_of(8), SHAPE, None) is None  # even steps, which get theirs at load
    assert INT4_TWICE_LAYOUT.repacked(steps_of(5, numbers=halves, in_order=False), SHAPE, None) is None
    assert INT4_TWICE_LAYOUT.repacked(steps_of(5, numbers=halves), (SHAPE[0], 48), None) is None  # groups of 16
    assert INT4_TWICE_LAYOUT.repacked(steps_of(5, numbers=halves), (32, SHAPE[1]), None) is None  # half a block of rows
    monkeypatch.setattr(nf4_cpu, "kernel_is_there", lambda: False)
    monkeypatch.setattr(table_kernels, "is_available", lambda: False)
    assert FP4_TWICE_LAYOUT.repacked(steps_of(5, numbers=halves), SHAPE, None) is None
    assert FP4_TWICE.variant == ""


def test_terms_of_another_processor_are_found_and_have_no_kernel() -> None:
    other = next(order for order in ORDERS if order not in {LANES, torch_order()})
    packing = replace(INT4_TWICE, term=Int4(order=other))
    stored = {
        name: (entry(name, torch.empty(packing.part_shapes(SHAPE)[part][0], dtype=torch.bfloat16)),)
        for part, name in packing.stored_names("a.weight").items()
    }
    weight = StoredParameter(name="a.weight", shape=SHAPE, stored=stored, stated={})
    found = INT4_TWICE.detect(weight)
    assert found == packing
    assert kernel_of(found, SHAPE, torch.bfloat16, CPU) is None
    assert detect_transposed(INT4_TWICE.detect, weight) is None
