"""Weights that stay are in large pages, as far as the system has them: their memory's flags or pages show it."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from offload.layouts.onednn import has_onednn, in_kernel_order
from offload.pages import LARGE_PAGE_BYTES, MappedFile, gather_in_large_pages, in_large_pages

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux says what it is told of memory")
SIZE = 4 * LARGE_PAGE_BYTES
IS_LARGE = "hg"  # of a mapping's flags


def entry_at(address: int, name: str) -> list[str]:
    """Return what the system says under a name of the mapping that has an address."""
    is_own = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            start, end = (int(number, 16) for number in first.split("-"))
            is_own = start <= address < end
        elif is_own and first == f"{name}:":
            return line.split()[1:]
    raise AssertionError(f"no mapping has {address:#x}")


def flags_at(address: int) -> list[str]:
    """Return the flags of the mapping that has an address."""
    return entry_at(address, "VmFlags")


def large_bytes_at(address: int) -> int:
    """Return how much of the mapping that has an address lies in large pages."""
    return int(entry_at(address, "AnonHugePages")[0]) << 10


def written(num_bytes: int) -> Tensor:
    """Return memory whose pages are there, each of them small."""
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    return memory.copy_(torch.arange(num_bytes) % 251)


def needs_gathering() -> None:
    memory = written(2 * SIZE)
    gather_in_large_pages(memory.data_ptr(), memory.nbytes)
    if not large_bytes_at(memory.data_ptr() + SIZE):
        pytest.skip("the system gathers no pages")


def fresh(num_bytes: int) -> Tensor:
    """Return memory that nothing has been told of: a heap's blocks may have had other lives."""
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)


def needs_flags() -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("the system has no large pages")


def test_memory_is_told_to_be_large_before_it_is_touched() -> None:
    needs_flags()
    memory = in_large_pages(fresh(SIZE))
    assert IS_LARGE in flags_at(memory.data_ptr() + LARGE_PAGE_BYTES)


def test_little_memory_stays_as_it_is() -> None:
    """It shares pages with what others allocate."""
    memory = fresh(LARGE_PAGE_BYTES - 1)
    assert in_large_pages(memory) is memory
    assert IS_LARGE not in flags_at(memory.data_ptr())


def test_the_part_of_a_file_that_stays_is_told(tmp_path: Path) -> None:
    needs_flags()
    path = tmp_path / "weights"
    path.write_bytes(bytes(SIZE))
    file = MappedFile(path)
    file.use_large_pages(LARGE_PAGE_BYTES, 2 * LARGE_PAGE_BYTES)
    address = file.bytes.data_ptr()
    found = [IS_LARGE in flags_at(address + place * LARGE_PAGE_BYTES) for place in range(4)]
    assert found == [False, True, False, False]


def test_memory_that_is_written_is_gathered() -> None:
    needs_gathering()
    memory = written(SIZE)
    expected = memory.clone()
    gather_in_large_pages(memory.data_ptr(), SIZE)
    assert large_bytes_at(memory.data_ptr()) >= SIZE - LARGE_PAGE_BYTES
    assert torch.equal(memory, expected)


def test_weights_in_the_order_of_a_kernel_are_gathered() -> None:
    """A pass reads all of their memory, which oneDNN allocates."""
    needs_gathering()
    if not has_onednn(torch.float32):
        pytest.skip("oneDNN does not multiply here")
    ordered = in_kernel_order(torch.ones(1024, 4096))
    address = torch.ops.mkldnn.data_ptr(ordered)
    assert large_bytes_at(address) >= SIZE - LARGE_PAGE_BYTES
