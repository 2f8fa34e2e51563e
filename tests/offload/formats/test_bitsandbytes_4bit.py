"""nf4 and fp4: blocks of 64 weights, unpacked as bitsandbytes defines them."""

import importlib
import sys
from types import SimpleNamespace

import pytest
import torch

from offload.formats import bitsandbytes_4bit
from offload.formats.bitsandbytes_4bit import (
    FEW_ROWS,
    FP4,
    NF4,
    Bitsandbytes4Bit,
    bitsandbytes_functional,
    most_rows,
)
from tests.offload.formats.bitsandbytes_checkpoints import block_scales, looked_up


@pytest.mark.parametrize("shape", [(48, 96), (96, 48), (256, 96), (2, 8, 24), (64, 64)], ids=str)
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("known", [NF4, FP4], ids=lambda known: known.name)
def test_four_bit_weights_unpack_by_definition(
    known: Bitsandbytes4Bit, nested: bool, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows need not be whole blocks: bitsandbytes' own CPU kernel gets those wrong."""
    rows = torch.randn(shape).reshape(-1, 64)
    packed, state = bitsandbytes_functional().quantize_4bit(
        rows, blocksize=64, compress_statistics=nested, quant_type=known.name
    )
    parts = {"packed": packed, "absmax": state.absmax}
    if nested:
        parts["nested_absmax"] = state.state2.absmax
    offset = float(state.offset) if nested else 0.0
    packing = Bitsandbytes4Bit(name=known.name, nested=nested, offset=offset)
    expected = looked_up(packed, block_scales(state), shape, known.name)
    torch.testing.assert_close(packing.unpack(parts, torch.empty(shape)), expected)
    monkeypatch.setattr(bitsandbytes_4bit, "MAX_WEIGHTS_AT_ONCE_ON_CPU", 512)
    torch.testing.assert_close(packing.unpack(parts, torch.empty(shape)), expected)


def test_a_block_of_zeros_stays_zero() -> None:
    weight = torch.zeros(8, 64)
    packing, parts = NF4.pack(weight)
    assert torch.equal(packing.unpack(parts, torch.empty(8, 64)), weight)


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
    found = NF4.kernel(shape, dtype, CARD)
    for rule in (operations._gemm_4bit_use_custom_fn, most_rows):
        rule.cache_clear()
    assert found is not None
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
