"""GGML's blocks are unpacked by compiled code: the numbers are those of torch's operations, bit by bit."""

from __future__ import annotations

import pytest
import torch

from offload.formats import gguf_unpacking
from offload.formats.gguf_blocks import TYPES
from offload.formats.gguf_unpacking import DTYPES, NAMES, is_native, unpack_blocks
from offload.native.block_grids import ALL_TEXTS
from offload.native.compiler import is_available

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(not is_available(), reason="no kernels can be compiled here")


@pytest.mark.parametrize("name", NAMES)
def test_blocks_of_any_bytes_are_those_numbers_rounded_once(name: str) -> None:
    """Also infinite scales, and memory that begins anywhere."""
    assert set(NAMES) == set(ALL_TEXTS)
    block = TYPES[name]
    blocks = torch.randint(0, 256, (3001 * block.num_bytes + 1,)).to(torch.uint8)[1:].view(3001, -1)
    expected = torch.empty(3001, block.weights)
    block.unpack(blocks.clone(), expected)
    for dtype in DTYPES:
        assert is_native(name, CPU, dtype)
        found, before = torch.empty(expected.shape, dtype=dtype), torch.get_num_threads()
        try:
            for count in (1, 2):
                torch.set_num_threads(count)
                unpack_blocks(block, blocks, found.fill_(7.0))
                assert torch.equal(found.isnan(), expected.isnan())
                assert torch.equal(found.nan_to_num(), expected.to(dtype).nan_to_num())
        finally:
            torch.set_num_threads(before)


def test_other_types_devices_and_dtypes_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_native("F16", CPU, torch.float32)
    assert not is_native("Q8_0", torch.device("cuda"), torch.float32)
    assert not is_native("Q8_0", CPU, torch.float16)
    gguf_unpacking._code.cache_clear()
    monkeypatch.setattr(gguf_unpacking, "is_available", lambda: False)
    assert not is_native("Q8_0", CPU, torch.float32)
    gguf_unpacking._code.cache_clear()


def test_code_that_gives_other_numbers_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    right = gguf_unpacking._unpack
    monkeypatch.setattr(gguf_unpacking, "_unpack", lambda code, blocks, out: right(code, blocks.roll(1, 0), out))
    gguf_unpacking._code.cache_clear()
    assert not is_native("Q8_0", CPU, torch.bfloat16)
    gguf_unpacking._code.cache_clear()
