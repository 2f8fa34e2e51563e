"""Q8_0, Q6_K and Q5_0 are put in an order of their own when they are loaded."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from offload.layouts import at_load, byte_lanes
from offload.layouts.at_load import layout_at_load
from offload.layouts.byte_lanes import BYTE_LANES_LAYOUT, KINDS, ByteLanes
from offload.layouts.known import kernel_of
from offload.native.compiler import is_available
from tests.offload.layouts.products import check_products, check_wrong_kernels_are_refused
from tests.offload.layouts.test_gguf_blocks import SHAPE, stored

CPU, BF16 = torch.device("cpu"), torch.bfloat16
needs_kernels = pytest.mark.skipif(not is_available(), reason="no kernels can be compiled here")


@needs_kernels
@pytest.mark.parametrize("share_rows", [32, 4096])
@pytest.mark.parametrize("heads", [0, 2])
@pytest.mark.parametrize("kind", KINDS[::-1])  # Q6_K's factors first
def test_products_are_those_of_the_blocks_and_a_row_has_its_bits_in_any_company(
    kind: str, heads: int, share_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a head's halves are put one after the other, and where some rows at a time are put in order."""
    monkeypatch.setattr(at_load, "SHARE_ROWS", share_rows)
    packing, blocks = stored(kind, heads=heads)
    weight = packing.unpack({"blocks": blocks}, torch.empty(SHAPE))
    rows = torch.randn(81, SHAPE[1]).bfloat16()
    for dtype, most in ((BF16, 0.0025), (torch.float32, 2e-5)):
        layout = layout_at_load(packing, SHAPE, dtype, CPU)
        assert layout.own == ByteLanes(kind=kind)
        parts = layout.parts_of({"blocks": blocks})
        assert {name: (tuple(part.shape), part.dtype) for name, part in parts.items()} == layout.own.part_shapes(SHAPE)
        assert torch.equal(layout.own.unpack(parts, torch.empty(SHAPE)), weight)
        kernel, _ = check_products(layout.kernel, parts, rows.to(dtype), weight.double(), most=most)
        native = kernel.native(parts)
        assert (native.rows, native.columns, native.takes_rounded) == (*SHAPE, True)


@needs_kernels
def test_what_it_does_not_know_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    packing, _ = stored("Q6_K")
    assert BYTE_LANES_LAYOUT.repacked(packing, SHAPE, None) is None, "files keep their blocks"
    assert BYTE_LANES_LAYOUT.repacked(packing, SHAPE, torch.device("cuda")) is None
    assert BYTE_LANES_LAYOUT.repacked(replace(packing, is_transposed=True), SHAPE, CPU) is None
    assert BYTE_LANES_LAYOUT.repacked(replace(packing, num_matrices=2), (2, *SHAPE), CPU) is None
    assert BYTE_LANES_LAYOUT.repacked(stored("Q6_K", shape=(33, 512))[0], (33, 512), CPU) is None
    assert BYTE_LANES_LAYOUT.repacked(stored("Q5_K")[0], SHAPE, CPU) is None
    assert kernel_of(ByteLanes(), SHAPE, torch.float16, CPU) is None
    monkeypatch.setattr(byte_lanes, "is_available", lambda: False)
    assert BYTE_LANES_LAYOUT.repacked(packing, SHAPE, CPU) is None
    assert kernel_of(ByteLanes(), SHAPE, BF16, CPU) is None


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_whose_products_are_wrong_are_not_used(kind: str) -> None:
    own = ByteLanes(kind=kind)
    check_wrong_kernels_are_refused(byte_lanes, lambda: kernel_of(own, SHAPE, BF16, CPU) is not None)
