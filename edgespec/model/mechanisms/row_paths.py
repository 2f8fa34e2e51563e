"""Where the keys lie that rows see, by position: the rows of a tree are not in the order of their positions.

All rows see the keys before the tail, each at its position. In the tail a row sees its ancestors and itself, whose
places say nothing of their positions. Legend: m rows, g groups of heads with a choice of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from edgespec.model.mechanisms.first_of_equal import best_of

NONE = 1 << 40  # the number of a block that no text has


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPaths:
    """The places of the keys that each of m rows sees."""

    num_before: int  # keys before the tail
    in_tail: Tensor  # [m, depth], places of the others by position, itself the last; any places after it
    counts: Tensor  # [m], of the keys that each row sees
    longest: int  # of these counts

    @classmethod
    def of_text(cls, num_rows: int, num_before: int, device: torch.device) -> RowPaths:
        """Return those of rows each of which is the child of the one before."""
        tail = torch.arange(num_rows, device=device) + num_before
        return cls(
            num_before=num_before,
            in_tail=tail.expand(num_rows, num_rows),
            counts=tail + 1,
            longest=num_before + num_rows,
        )

    @classmethod
    def of_tree(cls, visible: Tensor, num_before: int) -> RowPaths:
        """Return those of rows that see these keys of the tail, [m, tail] bool: ancestors lie in their order."""
        depths = visible.sum(1)
        deepest = int(depths.max())  # once a pass: shapes depend on it
        order = (~visible).to(torch.uint8).sort(stable=True, dim=1).indices
        return cls(
            num_before=num_before,
            in_tail=order[:, :deepest] + num_before,
            counts=depths + num_before,
            longest=num_before + deepest,
        )

    def rows(self, which: slice) -> RowPaths:
        """Return those of some of the rows; `longest` stays."""
        return RowPaths(
            num_before=self.num_before, in_tail=self.in_tail[which], counts=self.counts[which], longest=self.longest
        )

    def places(self, positions: Tensor) -> Tensor:
        """Return the places of the keys at these positions [g, m, k], as each row sees them; -1 where it sees none."""
        depths = (positions - self.num_before).clamp(0, self.in_tail.shape[1] - 1)
        own = self.in_tail.expand(positions.shape[0], -1, -1).gather(2, depths)
        found = torch.where(positions < self.num_before, positions, own)
        return found.masked_fill(positions >= self.counts[:, None], -1)

    def nearest(self, count: int) -> Tensor:
        """Return the places [m, k] of the last keys that each row sees, itself the last; -1 where there are fewer."""
        count = min(count, self.longest)
        positions = self.counts[:, None] + torch.arange(-count, 0, device=self.counts.device)
        return self.places(positions[None])[0].clamp(min=-1)

    def places_of_blocks(self, blocks: Tensor, size: int, *, with_rest: bool) -> Tensor:
        """Return the places [g, m, k] of the keys of blocks [g, m, b], each of `size` positions; NONE is no block.

        The rest are the keys after a row's last whole block.
        """
        offsets = torch.arange(size, device=blocks.device)
        positions = (blocks[..., None] * size + offsets).flatten(2)
        if with_rest:
            rest = (self.counts // size * size)[:, None] + offsets[:-1]
            positions = torch.cat([positions, rest.expand(blocks.shape[0], -1, -1)], 2)
        return self.places(positions)


def best_blocks(scores: Tensor, most: int) -> Tensor:
    """Return the numbers [g, m, most] of the blocks with the highest scores [g, m, b], ascending; NONE after them.

    A block that a row may not choose has the score -inf. Of equal ones the first are better.
    """
    found = best_of(scores, min(most, scores.shape[-1]))
    return found.indices.masked_fill(found.values == -torch.inf, NONE).sort(-1).values
