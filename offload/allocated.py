"""The bytes that torch's allocator takes from CUDA for a block.

It takes small blocks from buffers of 2 MiB, middle ones from buffers of 20 MiB, and rounds large ones up.
Source: c10/cuda/CUDACachingAllocator.cpp. Expandable segments only pack more tightly.
"""

MIB = 1 << 20
BLOCK_BYTES = 512  # blocks are multiples
SMALL_BYTES = MIB  # a small block at most
ROUND_BYTES = 2 * MIB  # buffers of small blocks, and what large blocks are rounded up to
LEAST_SINGLE_BYTES = 10 * MIB  # of a block that has a buffer of its own
LARGE_BUFFER_BYTES = 20 * MIB  # of the blocks between


def allocated_bytes(num_bytes: int) -> int:
    """Return the share of a block of so many bytes, where there are many of them."""
    block_bytes = -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES
    if not block_bytes or block_bytes >= LEAST_SINGLE_BYTES:
        return -(-block_bytes // ROUND_BYTES) * ROUND_BYTES
    buffer_bytes = ROUND_BYTES if block_bytes <= SMALL_BYTES else LARGE_BUFFER_BYTES
    return buffer_bytes // (buffer_bytes // block_bytes)
