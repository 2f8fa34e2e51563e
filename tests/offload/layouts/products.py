"""What all kernels of packed weights promise of their products."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType

import pytest
import torch
from torch import Tensor

from offload.layouts.layout import Kernel, stays_packed
from offload.native.weights import NativeWeight


def check_products(
    kernel: Kernel | None, parts: Mapping[str, Tensor], rows: Tensor, weight: Tensor, *, most: float
) -> tuple[Kernel, Tensor]:
    """Return the kernel, and its products of rows, which are off by `most` beside a float64 weight.

    A row has its bits in any company, and a bias is added to what rows of any front dimensions have.
    """
    found, exact = kernel.multiply(parts, rows, None), rows.double() @ weight.T
    assert float((found.double() - exact).norm() / exact.norm()) < most
    for count in (1, 2, 7, 33):
        assert torch.equal(kernel.multiply(parts, rows[:count], None), found[:count])
    bias = torch.randn(len(weight)).bfloat16().to(rows.dtype)
    biased = kernel.multiply(parts, rows.unflatten(0, (-1, 9)), bias)
    assert torch.equal(biased, (found + bias).unflatten(0, (-1, 9)))
    return kernel, found


def see_company(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a row's products by compiled kernels depend on how many rows stand beside it."""
    right = NativeWeight.product
    monkeypatch.setattr(NativeWeight, "product", lambda own, rows: right(own, rows) * (1 + len(rows) * 2**-22))


def check_wrong_kernels_are_refused(
    layout: ModuleType, is_served: Callable[[], bool], *changes: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """See that no kernel serves where sums depend on the rows beside, nor by each of these changes."""
    try:
        for change in (see_company, *changes):
            layout._is_right.cache_clear()
            with pytest.MonkeyPatch.context() as patched:
                change(patched)
                assert not is_served(), change
    finally:
        layout._is_right.cache_clear()


def check_company_changes_no_bits(multiply: Callable[[Tensor], Tensor], rows: Tensor) -> None:
    """More rows than are multiplied as few have the bits of few, where they are those of a tree."""
    token = stays_packed.set(True)
    try:
        found = multiply(rows)
    finally:
        stays_packed.reset(token)
    assert torch.equal(found[-3:], multiply(rows[-3:]))
    assert not torch.equal(found, multiply(rows))
