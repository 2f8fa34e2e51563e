"""Memory for weights that stay leaves no holes in the heap."""

from __future__ import annotations

import ctypes
import sys

import pytest
import torch

from offload.pages import large_blocks_apart


class _MallocInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")] + [
        ("others", ctypes.c_size_t * 5)
    ]


@pytest.mark.skipif(
    not sys.platform.startswith("linux") or not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="not glibc"
)
def test_blocks_of_weights_are_pages_of_their_own_and_others_are_not() -> None:
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _MallocInfo

    def pages_of_their_own(num_bytes: int) -> int:
        before = mallinfo().hblks
        kept = torch.empty(num_bytes, dtype=torch.uint8)
        return int(mallinfo().hblks) - int(before) if kept.numel() else 0

    with large_blocks_apart():
        assert pages_of_their_own(2 << 20) == 1
    assert pages_of_their_own(2 << 20) == 0
    assert pages_of_their_own(64 << 20) == 1
