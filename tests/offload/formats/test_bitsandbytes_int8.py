"""int8: rows of whole numbers with a scale each."""

import pytest
import torch

from offload.formats.bitsandbytes_4bit import bitsandbytes_functional
from offload.formats.bitsandbytes_int8 import INT8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_int8_rows_are_scaled_before_they_are_rounded(dtype: torch.dtype) -> None:
    _, parts = INT8.pack(torch.randn(16, 64) * 1e-4)
    exact = INT8.unpack(parts, torch.empty(16, 64))
    assert torch.equal(INT8.unpack(parts, torch.empty(16, 64, dtype=dtype)), exact.to(dtype))


def test_int8_rows_are_those_of_bitsandbytes() -> None:
    functional = bitsandbytes_functional()
    weight = torch.randn(40, 64).half()
    weight[3] = 0
    packed, scale, _ = functional.int8_vectorwise_quant(weight)
    _, parts = INT8.pack(weight)
    assert (parts["packed"].int() - packed.int()).abs().max() <= 1  # halves are rounded one way or the other
    torch.testing.assert_close(parts["scale"], scale)
    expected = functional.int8_vectorwise_dequant(parts["packed"], parts["scale"])
    torch.testing.assert_close(INT8.unpack(parts, torch.empty(40, 64)), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_large_weights_are_unpacked_some_rows_at_a_time(dtype: torch.dtype) -> None:
    """In float32, rounded once; the last time there are fewer rows."""
    packing, parts = INT8.pack(torch.randn(2, 150, 1024))
    expected = parts["packed"].float() * (parts["scale"] / 127).view(2, 150, 1)
    assert torch.equal(packing.unpack(parts, torch.empty(2, 150, 1024, dtype=dtype)), expected.to(dtype))
