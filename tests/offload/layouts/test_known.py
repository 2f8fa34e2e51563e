"""What every compute layout of the list holds to: its products are right, a row has its bits in any company."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from offload.formats.bitsandbytes_4bit import FP4, NF4
from offload.formats.storage import PackedStorage, StoredParameter
from offload.layouts.known import LAYOUTS, LOSSLESS, QUANTIZERS
from offload.layouts.layout import ComputeLayout, LosslessLayout
from tests.offload.formats import definitions
from tests.offload.formats.definitions import PUBLISHED, Parts
from tests.offload.formats.test_published import entry, found_packing

CPU, CARD, BF16 = torch.device("cpu"), torch.device("cuda"), torch.bfloat16
SHAPE = (128, 128)
COUNTS = (1, 2, 7, 16, 80)
MOST_ERROR = 1.2  # over that of bf16 weights
# Of what is rounded when a scale becomes bf16; published ones that bf16 has are exact
ROUNDED = 0.004
EXACT = {"compressed-mxfp4", "compressed-int4"}


def name_of(layout: ComputeLayout) -> str:
    return layout.own.name


@functools.cache
def stored_weights() -> list[tuple[str, PackedStorage, Parts, Tensor]]:
    """Random weights in every published format, in groups that kernels know: storage, parts, and what they mean."""
    found: list[tuple[str, PackedStorage, Parts, Tensor]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(definitions, "GROUP", 32)
        for form, published in PUBLISHED.items():
            parts = published.parts(*SHAPE)
            found.append((form, *found_packing(published, parts, SHAPE), published.meaning(parts, *SHAPE)))
    for known in (NF4, FP4):
        stored, parts = known.pack(torch.randn(SHAPE))
        found.append((known.name, stored, parts, stored.unpack(parts, torch.empty(SHAPE))))
    return found


def weights_in(layout: ComputeLayout) -> Iterator[tuple[str, PackedStorage, Parts, Tensor]]:
    """The weights that are put in a layout, or one that is rounded for it: name, storage, parts, what was stored."""
    packer = next((packer for packer in QUANTIZERS if packer == layout.own), None)
    if packer is not None:
        stored, parts = packer.pack(torch.randn(SHAPE))
        yield "rounded", stored, parts, stored.unpack(parts, torch.empty(SHAPE))
    if isinstance(layout, LosslessLayout):
        for name, stored, parts, meaning in stored_weights():
            repacked = layout.repacked(stored, SHAPE, None) or layout.repacked(stored, SHAPE, CPU)
            if repacked is not None:
                yield name, repacked.storage, repacked.repack("a.weight", parts), meaning


@pytest.mark.parametrize("layout", LOSSLESS, ids=name_of)
def test_a_weight_that_is_put_in_a_layout_has_its_numbers_and_is_found_again(layout: LosslessLayout) -> None:
    for name, own, parts, meaning in weights_in(layout):
        assert {part: (tuple(found.shape), found.dtype) for part, found in parts.items()} == own.part_shapes(SHAPE)
        again = own.unpack(parts, torch.full(SHAPE, torch.nan))
        error = (again.double() - meaning.double()).norm() / meaning.double().norm()
        assert error <= (0.0 if name in EXACT else ROUNDED), name
        in_bf16 = own.unpack(parts, torch.empty(SHAPE, dtype=BF16))
        assert torch.equal(in_bf16, again.bfloat16()), f"{name} is rounded more than once"
        names = own.stored_names("a.weight")
        stored = {stored_name: (entry(stored_name, parts[part]),) for part, stored_name in names.items()}
        weight = StoredParameter(name="a.weight", shape=SHAPE, stored=stored, stated={})
        detected = [found for other in LOSSLESS if (found := other.detect(weight)) is not None]
        assert detected == [own], name


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_products_are_near_those_of_bf16_weights_and_a_row_has_its_bits_in_any_company(layout: ComputeLayout) -> None:
    rows, bias = torch.randn(max(COUNTS), SHAPE[1]).bfloat16(), torch.randn(SHAPE[0]).bfloat16()
    is_tried = False
    for name, own, parts, _ in weights_in(layout):
        kernel = layout.kernel(own, SHAPE, BF16, CPU)
        if kernel is None:
            continue
        is_tried = True
        assert kernel.max_rows >= max(COUNTS), "a tree's rows are multiplied in one way"
        weight = own.unpack(parts, torch.empty(SHAPE)).double()
        exact = rows.double() @ weight.T
        of_bf16 = (torch.nn.functional.linear(rows, weight.bfloat16()).double() - exact).norm()
        for multiply in filter(None, (kernel.multiply, kernel.of_any_rows)):
            product = multiply(parts, rows, None)
            assert (product.double() - exact).norm() < MOST_ERROR * of_bf16, name
            for count in COUNTS:
                assert torch.equal(multiply(parts, rows[:count], None), product[:count]), (name, count)
            biased = multiply(parts, rows[:2, None], bias)
            torch.testing.assert_close(biased[:, 0].float(), (product[:2] + bias).float(), rtol=0.02, atol=0.02)
    if not is_tried:
        pytest.skip("this processor has no such kernel")


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_a_layout_leaves_to_others_what_is_not_its_own(layout: ComputeLayout) -> None:
    assert layout.kernel(layout.own, SHAPE, torch.float16, CPU) is None
    for device in (CPU, CARD):
        assert layout.kernel(layout.own, (2, *SHAPE), BF16, device) is None
        for other in (other.own for other in LAYOUTS if type(other.own) is not type(layout.own)):
            assert layout.kernel(other, SHAPE, BF16, device) is None, other.name
