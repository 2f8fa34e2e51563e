"""Which experts stay in memory: those that were asked for most often and most lately.

An expert's value is the number of times that it was asked for, each halved for every so many passes since. Values of
all experts are remembered, of those in memory and of others, so that an expert's past counts when it comes back.
This is bookkeeping alone; what an expert's memory is, is somebody else's business.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

HALF_LIFE_PASSES = 16.0
NEVER = float("-inf")
KEPT_FOR_NOW = float("inf")


class ExpertCache:
    """The experts in memory, within `capacity_bytes`; one is always admitted where none is in use.

    `expert_bytes` has the size of an expert for each of the layers that have some.
    """

    def __init__(self, expert_bytes: Sequence[int], *, num_experts: int, capacity_bytes: int) -> None:
        self._expert_bytes = tuple(expert_bytes)
        self._capacity_bytes = capacity_bytes
        self._used_bytes = 0
        shape = (len(self._expert_bytes), num_experts)
        # log2 of the value, as it would be at the first pass: halving changes all alike, so none has to be updated.
        self._values = torch.full(shape, NEVER, dtype=torch.float64)  # [layers, experts]
        self._is_kept = torch.zeros(shape, dtype=torch.bool)
        self._in_use: dict[tuple[int, int], int] = {}
        self._pass, self._last_row = 0, -1

    @property
    def used_bytes(self) -> int:
        """The bytes of the experts in memory."""
        return self._used_bytes

    def ask(self, row: int, experts: Sequence[int]) -> list[int]:
        """Count that a layer's experts are asked for; return those in memory, which are in use from now on."""
        self._pass += row < self._last_row  # a pass begins where the first layers come again
        self._last_row = row
        asked = torch.tensor(experts)
        now = torch.tensor(self._pass / HALF_LIFE_PASSES, dtype=torch.float64)
        self._values[row, asked] = torch.logaddexp2(self._values[row, asked], now)
        kept: list[int] = asked[self._is_kept[row, asked]].tolist()
        for expert in kept:
            self._hold(row, expert)
        return kept

    def admit(self, row: int, expert: int) -> list[tuple[int, int]] | None:
        """Make room for an expert, which is in use from now on; return those that leave for it.

        None says that there is no room before another expert is released. Experts in use stay, and so do those of
        the same layer as long as others can leave: the next rows of the pass may ask for them.
        """
        wanted_bytes = self._used_bytes + self._expert_bytes[row] - self._capacity_bytes
        leaving: list[tuple[int, int]] = []
        if wanted_bytes > 0:
            values = self._values.masked_fill(~self._is_kept, KEPT_FOR_NOW)
            for held in self._in_use:
                values[held] = KEPT_FOR_NOW
            own = values[row].clone()
            values[row] = KEPT_FOR_NOW
            while wanted_bytes > 0:
                place = int(values.argmin())
                if values.view(-1)[place] == KEPT_FOR_NOW:
                    if (own == KEPT_FOR_NOW).all():
                        break
                    values[row], own = own, torch.full_like(own, KEPT_FOR_NOW)
                    continue
                values.view(-1)[place] = KEPT_FOR_NOW
                leaving.append(divmod(place, values.shape[1]))
                wanted_bytes -= self._expert_bytes[leaving[-1][0]]
            if wanted_bytes > 0 and self._in_use:
                return None
        for left in leaving:
            self._remove(*left)
        self._is_kept[row, expert] = True
        self._used_bytes += self._expert_bytes[row]
        self._hold(row, expert)
        return leaving

    def release(self, row: int, expert: int) -> None:
        """Say that an expert is not in use any more; it may leave."""
        left = self._in_use.pop((row, expert)) - 1
        if left:
            self._in_use[row, expert] = left

    def forget(self, row: int, expert: int) -> None:
        """Say that an expert could not be brought into memory, or was in use in vain."""
        self._in_use.pop((row, expert), None)
        self._remove(row, expert)

    def is_kept(self, row: int, expert: int) -> bool:
        """Return whether an expert is in memory."""
        return bool(self._is_kept[row, expert])

    def _hold(self, row: int, expert: int) -> None:
        self._in_use[row, expert] = self._in_use.get((row, expert), 0) + 1

    def _remove(self, row: int, expert: int) -> None:
        self._is_kept[row, expert] = False
        self._used_bytes -= self._expert_bytes[row]
