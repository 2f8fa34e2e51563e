"""Memory for weights that stay leaves no holes in the heap."""

import ctypes
import subprocess
import sys

import pytest

# In a process of its own: an older one's heap has free pieces of any size
PROGRAM = """
import ctypes, torch
from offload.pages import large_blocks_apart

class MallocInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")]
    _fields_ += [("others", ctypes.c_size_t * 5)]

mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = MallocInfo
kept = []

def pages_of_their_own(num_bytes):
    before = mallinfo().hblks
    kept.append(torch.empty(num_bytes, dtype=torch.uint8))
    return mallinfo().hblks - before

with large_blocks_apart():
    apart = pages_of_their_own(2 << 20)
print(apart, pages_of_their_own(2 << 20), pages_of_their_own(64 << 20))
"""


@pytest.mark.skipif(
    not sys.platform.startswith("linux") or not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="not glibc"
)
def test_blocks_of_weights_are_pages_of_their_own_and_others_are_not() -> None:
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["1", "0", "1"]
