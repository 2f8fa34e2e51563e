"""nf4 and fp4: blocks of 64 weights, unpacked as bitsandbytes defines them."""

import pytest
import torch

from offload.formats import bitsandbytes_4bit
from offload.formats.bitsandbytes_4bit import FP4, NF4, Bitsandbytes4Bit, bitsandbytes_functional
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
