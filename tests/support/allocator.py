"""torch's allocator of CUDA memory as a model: blocks from buffers, rounded up, within a limit.

Blocks up to 1 MiB come from buffers of 2 MiB, those below 10 MiB from buffers of 20 MiB; larger ones have a buffer of
their own, a multiple of 2 MiB. A freed block joins its free neighbours; of those that fit, the smallest is taken.
Where a buffer would go beyond the limit, all free buffers are given back first. This is c10's CUDACachingAllocator
without expandable segments, which only pack more tightly.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

import torch

from offload.allocated import BLOCK_BYTES, LARGE_BUFFER_BYTES, LEAST_SINGLE_BYTES, MIB, ROUND_BYTES, SMALL_BYTES


@dataclass(slots=True, eq=False)
class Block:
    """Part of a buffer."""

    num_bytes: int
    is_small: bool
    before: Block | None = field(default=None, repr=False)
    after: Block | None = field(default=None, repr=False)
    is_free: bool = False


class RoundingAllocator:
    """Blocks within `limit_bytes`; beyond them it raises torch.OutOfMemoryError."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        self._limit_bytes = limit_bytes
        self._free: dict[bool, list[tuple[int, int, Block]]] = {False: [], True: []}  # by size, small ones apart
        self.reserved_bytes = 0
        self.peak_bytes = 0

    def take(self, num_bytes: int) -> Block:
        """Return a block of at least so many bytes."""
        num_bytes = max(BLOCK_BYTES, _up(num_bytes, BLOCK_BYTES))
        is_small = num_bytes <= SMALL_BYTES
        block = self._best(num_bytes, is_small) or self._new(num_bytes, is_small)
        block.is_free = False
        left_bytes = block.num_bytes - num_bytes
        if left_bytes >= BLOCK_BYTES if is_small else left_bytes > SMALL_BYTES:
            rest = Block(left_bytes, is_small, before=block, after=block.after)
            if block.after is not None:
                block.after.before = rest
            block.num_bytes, block.after = num_bytes, rest
            self._add(rest)
        return block

    def give(self, block: Block) -> None:
        """Take a block back."""
        for other in (block.before, block.after):
            if other is None or not other.is_free:
                continue
            self._remove(other)
            first, second = (other, block) if other is block.before else (block, other)
            block.num_bytes += other.num_bytes
            block.before, block.after = first.before, second.after
        if block.before is not None:
            block.before.after = block
        if block.after is not None:
            block.after.before = block
        self._add(block)

    def _new(self, num_bytes: int, is_small: bool) -> Block:
        buffer_bytes = 2 * MIB if is_small else LARGE_BUFFER_BYTES
        if num_bytes >= LEAST_SINGLE_BYTES:
            buffer_bytes = _up(num_bytes, ROUND_BYTES)
        if self._limit_bytes is not None and self.reserved_bytes + buffer_bytes > self._limit_bytes:
            self._give_back_buffers()
            if self.reserved_bytes + buffer_bytes > self._limit_bytes:
                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {buffer_bytes / MIB:.2f} MiB.")
        self.reserved_bytes += buffer_bytes
        self.peak_bytes = max(self.peak_bytes, self.reserved_bytes)
        return Block(buffer_bytes, is_small)

    def _give_back_buffers(self) -> None:
        for blocks in self._free.values():
            whole = [one for one in blocks if one[2].before is None and one[2].after is None]
            self.reserved_bytes -= sum(num_bytes for num_bytes, _, _ in whole)
            blocks[:] = [one for one in blocks if one not in whole]

    def _best(self, num_bytes: int, is_small: bool) -> Block | None:
        blocks = self._free[is_small]
        place = bisect.bisect_left(blocks, (num_bytes, 0))
        return blocks.pop(place)[2] if place < len(blocks) else None

    def _add(self, block: Block) -> None:
        block.is_free = True
        bisect.insort(self._free[block.is_small], (block.num_bytes, id(block), block))

    def _remove(self, block: Block) -> None:
        block.is_free = False
        blocks = self._free[block.is_small]
        del blocks[bisect.bisect_left(blocks, (block.num_bytes, id(block)))]


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
