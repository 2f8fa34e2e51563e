"""The experts that were requested most often and most lately stay in memory.

An expert's value is the number of its requests, each halved for every `HALF_LIFE_PASSES` since. Values of
all experts are remembered, of those in memory and of others, so that an expert's past counts when it comes back.
This is bookkeeping alone, in numpy, whose calls on a few numbers take less than torch's: every layer waits for them.
"""

from collections.abc import Sequence

import numpy as np

from offload.experts.expert_use import ExpertUse

# Of routers whose experts are popular, and those of which a part comes again in the next pass: shorter forgets what
# is popular, longer forgets the last requests.
HALF_LIFE_PASSES = 3.0
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
        self._values = np.full(shape, NEVER)  # [layers, experts]
        self._is_kept = np.zeros(shape, dtype=bool)
        self._is_in_use = np.zeros(shape, dtype=bool)
        self._pass, self._last_row = 0, -1
        self._is_requested = np.zeros(num_experts, dtype=bool)  # of the layer of the last request
        self._num_passes = np.zeros(shape, dtype=np.int64)  # that requested an expert

    @property
    def used_bytes(self) -> int:
        """The bytes of the experts in memory."""
        return self._used_bytes

    def use(self) -> ExpertUse:
        """Return the share of the passes so far that requested each expert."""
        shares = self._num_passes / (self._pass + 1)
        return tuple(map(tuple, shares.tolist()))

    def request(self, row: int, experts: Sequence[int]) -> list[int]:
        """Count a layer's requests; return the experts in memory, which are in use from now on."""
        if row != self._last_row:
            self._pass += row < self._last_row  # a pass begins where the first layers come again
            self._last_row = row
            self._is_requested[:] = False
        requested = np.array(experts, dtype=np.intp)
        values = self._values[row]
        values[requested] = np.logaddexp2(values[requested], self._pass / HALF_LIFE_PASSES)
        self._num_passes[row, requested] += ~self._is_requested[requested]  # a pass comes in chunks
        self._is_requested[requested] = True
        kept: list[int] = requested[self._is_kept[row, requested]].tolist()
        self._is_in_use[row, kept] = True
        return kept

    def admit(self, row: int, expert: int) -> list[tuple[int, int]] | None:
        """Admit an expert, which is in use from now on; return those that leave for it.

        None says that another expert must be released first. Experts in use stay, and so do those that the layer
        requested, as long as others can leave: the next rows of the pass may need them too.
        """
        leaving = self._leaving(row, self._used_bytes + self._expert_bytes[row] - self._capacity_bytes)
        if leaving is None and self._is_in_use.any():
            return None
        if leaving is None:
            leaving = [(int(other), int(left)) for other, left in np.argwhere(self._is_kept)]
        for other, left in leaving:
            self._remove(other, left)
        self._is_kept[row, expert] = self._is_in_use[row, expert] = True
        self._used_bytes += self._expert_bytes[row]
        return leaving

    def release(self, row: int, expert: int) -> None:
        """Say that an expert is not in use any more; it may leave."""
        self._is_in_use[row, expert] = False

    def forget(self, row: int, expert: int) -> None:
        """Say that an expert could not be brought into memory."""
        self._is_in_use[row, expert] = False
        self._remove(row, expert)

    def clear(self) -> None:
        """Say that no expert is in memory; past requests are remembered."""
        self._is_kept[:] = self._is_in_use[:] = False
        self._used_bytes = 0

    def is_kept(self, row: int, expert: int) -> bool:
        """Return whether an expert is in memory."""
        return bool(self._is_kept[row, expert])

    def _leaving(self, row: int, missing_bytes: int) -> list[tuple[int, int]] | None:
        """Return the least valued experts that have these bytes together; None where too many are in use."""
        leaving: list[tuple[int, int]] = []
        if missing_bytes <= 0:
            return leaving
        values = np.where(self._is_kept & ~self._is_in_use, self._values, KEPT_FOR_NOW)
        spared = values[row, self._is_requested]
        values[row, self._is_requested] = KEPT_FOR_NOW
        while missing_bytes > 0:
            place = int(values.argmin())
            if values.flat[place] == KEPT_FOR_NOW:
                if not (spared < KEPT_FOR_NOW).any():
                    return None
                values[row, self._is_requested] = spared
                spared = spared[:0]
                continue
            values.flat[place] = KEPT_FOR_NOW
            leaving.append(divmod(place, values.shape[1]))
            missing_bytes -= self._expert_bytes[leaving[-1][0]]
        return leaving

    def _remove(self, row: int, expert: int) -> None:
        self._is_kept[row, expert] = False
        self._used_bytes -= self._expert_bytes[row]
