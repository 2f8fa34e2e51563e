"""int8: rows of whole numbers with a scale each."""

import pytest
import torch

from offload.formats import bitsandbytes_int8
from offload.formats.bitsandbytes_4bit import bitsandbytes_functional
from offload.formats.bitsandbytes_int8 import CAPABILITIES, INT8
from offload.formats.packed_format import Kernel

CPU, BF16 = torch.device("cpu"), torch.bfloat16
SHAPE = (131, 96)
needs_kernel = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in CAPABILITIES, reason="the kernel is slow on this processor"
)


def kernel() -> Kernel:
    found = INT8.kernel(SHAPE, BF16, CPU)
    assert found is not None
    return found


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


@needs_kernel
def test_few_rows_are_multiplied_as_exactly_as_with_bf16_weights() -> None:
    _, parts = INT8.pack(torch.randn(SHAPE) * torch.rand(SHAPE[0], 1))
    weight, rows, bias = (
        INT8.unpack(parts, torch.empty(SHAPE)),
        torch.randn(2, 3, 96).to(BF16),
        torch.randn(131).to(BF16),
    )
    exact = torch.nn.functional.linear(rows.double(), weight.double(), bias.double())
    plain = torch.nn.functional.linear(rows, weight.to(BF16), bias)
    found = kernel().multiply(parts, rows, bias)
    assert found.dtype == BF16
    assert (found - exact).norm() <= 1.2 * (plain - exact).norm()


@needs_kernel
def test_a_row_has_the_same_bits_alone_and_among_those_of_a_tree() -> None:
    _, parts = INT8.pack(torch.randn(SHAPE))
    rows = torch.randn(80, 96).to(BF16)
    assert kernel().max_rows >= len(rows)
    together = kernel().multiply(parts, rows, None)
    assert all(torch.equal(kernel().multiply(parts, rows[row], None), together[row]) for row in range(len(rows)))


@needs_kernel
@pytest.mark.parametrize("bias", [None, torch.randn(131).to(BF16)], ids=["alone", "bias"])
def test_a_processor_without_bf16_multiplies_a_prompt_in_float32(
    bias: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bitsandbytes_int8, "many_rows_dtype", lambda *_: torch.float32)
    monkeypatch.setattr(bitsandbytes_int8, "weights_at_once", lambda _: 40 * 96)  # several shares, the last one smaller
    _, parts = INT8.pack(torch.randn(SHAPE))
    rows = torch.randn(2, 45, 96).to(BF16)
    exact = torch.nn.functional.linear(rows.double(), INT8.unpack(parts, torch.empty(SHAPE)).double())
    found = kernel().multiply(parts, rows, bias)
    assert found.dtype == BF16
    assert torch.allclose(found, (exact.to(BF16) if bias is None else exact.to(BF16) + bias), rtol=2**-7, atol=1e-3)
    few = kernel().multiply(parts, rows[0], bias)
    assert torch.equal(few, bitsandbytes_int8._multiply(parts, rows[0], bias)), "a tree's rows"


@pytest.mark.parametrize("capability", ["AVX512", "AVX2", "DEFAULT"])
def test_weights_are_unpacked_where_the_kernel_is_slow_or_reads_beyond_them(
    capability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert (INT8.kernel(SHAPE, BF16, CPU) is None) == (capability == "DEFAULT")
    assert INT8.kernel((64, 40), BF16, CPU) is None
    assert INT8.kernel(SHAPE, torch.float32, CPU) is None
    assert INT8.kernel((8, *SHAPE), BF16, CPU) is None
    assert INT8.kernel(SHAPE, BF16, torch.device("cuda")) is None
