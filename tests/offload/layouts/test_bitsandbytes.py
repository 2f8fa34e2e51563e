"""Products with bitsandbytes' weights as they are stored: which rows a card multiplies, and a CPU's of eight bits."""

import importlib
import sys
from types import SimpleNamespace

import pytest
import torch

from offload.formats.bitsandbytes_4bit import NF4
from offload.formats.bitsandbytes_int8 import INT8
from offload.layouts import bitsandbytes
from offload.layouts.bitsandbytes import CAPABILITIES, FEW_ROWS, most_rows
from offload.layouts.known import kernel_of
from offload.layouts.layout import Kernel
from offload.native.compiler import is_available
from tests.offload.layouts.products import (
    check_company_changes_no_bits,
    check_products,
    check_wrong_kernels_are_refused,
)

CPU = torch.device("cpu")
SHAPE, UNITS = (131, 96), (96, 160)  # of torch's kernel, and of ours
CARD = torch.device("cuda", 0)
BF16, WIDE, TALL = torch.bfloat16, (28672, 8192), (8192, 28672)


@pytest.mark.parametrize(
    ("multiprocessors", "capability", "dtype", "shape", "rows"),
    [
        (128, (8, 9), BF16, WIDE, 256),
        (128, (8, 9), BF16, TALL, 128),
        (128, (8, 9), BF16, (1024, 8192), 12),
        (82, (8, 6), BF16, WIDE, 128),
        (108, (8, 0), BF16, TALL, 32),
        (132, (9, 0), BF16, WIDE, 64),
        (40, (7, 5), BF16, WIDE, 7),
        (40, (7, 5), torch.float16, WIDE, 128),
        (148, (10, 0), BF16, TALL, 4),
        (128, (8, 9), torch.float32, WIDE, 7),
    ],
    ids=str,
)
def test_a_card_multiplies_as_many_rows_as_bitsandbytes_own_rule_says(
    multiprocessors: int,
    capability: tuple[int, int],
    dtype: torch.dtype,
    shape: tuple[int, int],
    rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _device: 0, raising=False)
    operations = importlib.import_module("bitsandbytes.backends.cuda.ops")
    monkeypatch.setattr(operations, "_gpu_dispatch_props", lambda _device: (multiprocessors, *capability))
    for rule in (operations._gemm_4bit_use_custom_fn, most_rows):
        rule.cache_clear()
    found = kernel_of(NF4, shape, dtype, CARD)
    for rule in (operations._gemm_4bit_use_custom_fn, most_rows):
        rule.cache_clear()
    assert found.max_rows == rows


def test_a_card_that_is_only_planned_for_multiplies_four_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_rule(*_: object) -> bool:
        raise RuntimeError("no such device")

    monkeypatch.setitem(
        sys.modules, "bitsandbytes.backends.cuda.ops", SimpleNamespace(_gemm_4bit_use_custom_fn=no_rule)
    )
    most_rows.cache_clear()
    assert most_rows(CARD, BF16, WIDE) == FEW_ROWS == 4
    most_rows.cache_clear()


needs_kernel = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in CAPABILITIES, reason="the kernel is slow on this processor"
)


def kernel() -> Kernel:
    found = kernel_of(INT8, SHAPE, BF16, CPU)
    assert found is not None
    return found


needs_compiler = pytest.mark.skipif(not is_available(), reason="no kernels can be compiled here")


@needs_compiler
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_whole_numbers_of_eight_bits_are_multiplied_as_they_lie_by_our_kernel(dtype: torch.dtype) -> None:
    """Wherever they begin, also where a whole pass is one call."""
    _, parts = INT8.pack(torch.randn(UNITS) * torch.rand(UNITS[0], 1))
    parts["packed"] = torch.cat((torch.zeros(1, dtype=torch.int8), parts["packed"].flatten()))[1:].view(UNITS)
    weight, rows = INT8.unpack(parts, torch.empty(UNITS)).double(), torch.randn(81, UNITS[1]).bfloat16().to(dtype)
    found = kernel_of(INT8, UNITS, dtype, CPU)
    own, _ = check_products(found, parts, rows, weight, most=0.0018 if dtype == BF16 else 1e-6)
    assert not own.native(parts).takes_rounded
    of_columns = own.multiply(parts, torch.eye(UNITS[1]).to(dtype), None)
    assert torch.equal(of_columns, weight.T.float().to(dtype))


@needs_compiler
def test_our_kernel_of_eight_bits_is_not_used_where_its_products_are_wrong() -> None:
    """Torch's serves then."""
    right = bitsandbytes.native_int8

    def neighbours_scales(patched: pytest.MonkeyPatch) -> None:
        patched.setattr(bitsandbytes, "native_int8", lambda parts: right({**parts, "scale": parts["scale"].roll(1)}))

    def is_served() -> bool:
        found = kernel_of(INT8, UNITS, BF16, CPU)
        return found is not None and found.native is not None

    check_wrong_kernels_are_refused(bitsandbytes, is_served, neighbours_scales)


@needs_kernel
def test_numbers_may_begin_anywhere_in_a_file() -> None:
    """Torch's kernel for AVX-512 would end the process: published files have them at any multiple of eight bytes."""
    _, parts = INT8.pack(torch.randn(SHAPE))
    rows, packed = torch.randn(10, SHAPE[1]).to(BF16), parts["packed"]
    memory = torch.empty(packed.numel() + 16, dtype=torch.int8)
    memory = memory[8 - memory.data_ptr() % 16 % 8 :]
    start = 8 if memory.data_ptr() % 16 == 0 else 0
    elsewhere = memory[start : start + packed.numel()].view(SHAPE).copy_(packed)
    assert elsewhere.data_ptr() % 16
    found = kernel().multiply({**parts, "packed": elsewhere}, rows, None)
    assert torch.equal(found, kernel().multiply(parts, rows, None))


@needs_kernel
@pytest.mark.parametrize("bias", [None, torch.randn(131).to(BF16)], ids=["alone", "bias"])
def test_a_processor_without_bf16_multiplies_a_prompt_in_float32(
    bias: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bitsandbytes, "many_rows_dtype", lambda *_: torch.float32)
    monkeypatch.setattr(bitsandbytes, "weights_at_once", lambda _: 40 * 96)  # several shares, the last one smaller
    _, parts = INT8.pack(torch.randn(SHAPE))
    rows = torch.randn(2, 45, 96).to(BF16)
    exact = torch.nn.functional.linear(rows.double(), INT8.unpack(parts, torch.empty(SHAPE)).double())
    found = kernel().multiply(parts, rows, bias)
    assert found.dtype == BF16
    assert torch.allclose(found, (exact.to(BF16) if bias is None else exact.to(BF16) + bias), rtol=2**-7, atol=1e-3)
    few = kernel().multiply(parts, rows[0], bias)
    assert torch.equal(few, bitsandbytes._multiply_int8(parts, rows[0], bias)), "a tree's rows"
    check_company_changes_no_bits(lambda some: kernel().multiply(parts, some, bias), rows.flatten(0, 1))


@pytest.mark.parametrize("capability", ["AVX512", "AVX2", "DEFAULT"])
def test_weights_are_unpacked_where_the_kernel_is_slow_or_reads_beyond_them(
    capability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert (kernel_of(INT8, SHAPE, BF16, CPU) is None) == (capability == "DEFAULT")
    assert kernel_of(INT8, (64, 40), BF16, CPU) is None
    assert kernel_of(INT8, SHAPE, torch.float32, CPU) is None
    assert kernel_of(INT8, (8, *SHAPE), BF16, CPU) is None
    assert kernel_of(INT8, SHAPE, BF16, torch.device("cuda")) is None
