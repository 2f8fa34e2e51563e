"""Experts are handed out as their layers request them: those in memory at once, the others as they are read.

The order in which they come is free, so reading and computing overlap. What an expert's memory is, mapped pages or a
device's, is the business of `ExpertMemory`, and so is which experts are computed on the host, where they lie.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import torch

from offload.experts.expert_cache import ExpertCache
from offload.experts.expert_group import ExpertGroup, ExpertWeights
from offload.experts.expert_use import ExpertUse
from offload.layer_store import LayerRecord

# Of a layer's experts: where this share is requested, the next layer's are likely to be, and are read meanwhile
SHARE_FOR_ALL = 0.75
MAX_UNDER_WAY = 16  # that are being read at a time
HOST = torch.device("cpu")

Wait = Callable[[], None]  # until an expert is there; raises what reading it met


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedExpert:
    """An expert that is ready to compute."""

    number: int  # in its layer
    weights: ExpertWeights
    device: torch.device  # that they are on, and that its rows have to come to


class ExpertMemory(Protocol):
    """The memory of experts, and their way into it. All methods are called on one thread."""

    device: torch.device  # of experts that are brought

    @property
    def num_pinned(self) -> int:
        """The number of experts that wait in locked memory."""

    def where_it_lies(self, group: ExpertGroup, record: LayerRecord, rows: int) -> ExpertWeights | None:
        """Return an absent expert's weights on the host, if these rows are computed there; None: it is brought."""

    def has_time(self) -> bool:
        """Return whether a further expert can be brought without delaying those that are waited for."""

    def bring(self, group: ExpertGroup, record: LayerRecord) -> Wait:
        """Begin to bring an expert into memory."""

    def acquire(self, group: ExpertGroup, record: LayerRecord) -> ExpertWeights:
        """Return the weights of an expert that is there."""

    def release(self, record: LayerRecord) -> None:
        """Know that all work that reads the expert is issued."""

    def drop(self, record: LayerRecord) -> None:
        """Let an expert's memory go, once it is not being read from or brought any more."""

    def announce(self, record: LayerRecord) -> None:
        """Let the disk start on an expert that is likely to be requested."""

    def clear(self) -> None:
        """Let all experts' memory go, once none is being brought any more."""

    def close(self) -> None:
        """End all reading: nothing is brought any more when this returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCounts:
    """Requests since the model was loaded; the difference of two records is of the time between them."""

    asked: int = 0  # experts, each once for a layer's rows
    hits: int = 0  # of these, in memory
    in_place: int = 0  # of the others, computed on the host, where they lay
    read_bytes: int = 0  # of the rest, as they are stored

    def __sub__(self, before: ExpertCounts) -> ExpertCounts:
        """Return the requests since `before`."""
        return ExpertCounts(
            asked=self.asked - before.asked,
            hits=self.hits - before.hits,
            in_place=self.in_place - before.in_place,
            read_bytes=self.read_bytes - before.read_bytes,
        )


class ExpertSource:
    """The experts of a model's layers, which are known by their place in `groups`."""

    def __init__(self, groups: Sequence[ExpertGroup], cache: ExpertCache, memory: ExpertMemory) -> None:
        self._groups = tuple(groups)
        self._cache = cache
        self._memory = memory
        self._announced: int | None = None  # the layer whose experts were announced last
        self._is_torn = False  # whether an interrupt left the books half written
        self.counts = ExpertCounts()

    def take(self, row: int, rows_of: Mapping[int, int]) -> Generator[HandedExpert]:
        """Yield each of the experts with its weights, which are valid until the next is taken.

        `rows_of` has the number of rows of each. Those in memory come first, then those that are computed where they
        lie, while the others are read. A caller that does not take all closes the iterator. Raises the error of reading
        an expert.
        """
        if self._is_torn:
            self._cache.clear()
            self._memory.clear()
        self._is_torn = True
        try:
            yield from self._handed_out(row, rows_of)
        except (Exception, GeneratorExit):
            self._is_torn = False
            raise
        self._is_torn = False

    @property
    def num_pinned(self) -> int:
        """The number of experts that wait in locked memory."""
        return self._memory.num_pinned

    @property
    def use(self) -> ExpertUse:
        """The share of the passes so far that requested each expert."""
        return self._cache.use()

    def close(self) -> None:
        """End all reading."""
        self._memory.close()

    def _handed_out(self, row: int, rows_of: Mapping[int, int]) -> Generator[HandedExpert]:
        group, cache, memory = self._groups[row], self._cache, self._memory
        ready = deque(cache.request(row, list(rows_of)))
        kept = set(ready)
        absent = [expert for expert in rows_of if expert not in kept]
        lying = {expert: memory.where_it_lies(group, group.experts[expert], rows_of[expert]) for expert in absent}
        in_place = deque((expert, weights) for expert, weights in lying.items() if weights is not None)
        missing = deque(expert for expert, weights in lying.items() if weights is None)
        under_way: deque[tuple[int, Wait]] = deque()
        self._count(group, asked=len(rows_of), hits=len(ready), in_place=len(in_place))
        needs_all = len(rows_of) >= SHARE_FOR_ALL * group.num_experts
        try:
            while ready or in_place or missing or under_way:
                self._begin(row, missing, under_way)
                if needs_all and not missing:
                    needs_all = False
                    self._announce_next(row)
                if in_place and not ready:
                    expert, weights = in_place.popleft()
                    yield HandedExpert(number=expert, weights=weights, device=HOST)
                    self._let_come(row, expert)
                    continue
                if not ready:
                    self._await(row, under_way, ready)
                weights = memory.acquire(group, group.experts[ready[0]])
                yield HandedExpert(number=ready[0], weights=weights, device=memory.device)
                self._release(row, ready.popleft())
        finally:
            while under_way:
                with suppress(Exception):  # one error is on its way out, and the next request meets the others again
                    self._await(row, under_way, ready)
            while ready:
                self._release(row, ready.popleft())

    def _begin(self, row: int, missing: deque[int], under_way: deque[tuple[int, Wait]]) -> None:
        """Begin to read missing experts, as far as there is memory."""
        group = self._groups[row]
        while missing and len(under_way) < MAX_UNDER_WAY:
            leaving = self._cache.admit(row, missing[0])
            if leaving is None:
                return
            for other, expert in leaving:
                self._memory.drop(self._groups[other].experts[expert])
            expert = missing.popleft()
            under_way.append((expert, self._memory.bring(group, group.experts[expert])))

    def _let_come(self, row: int, expert: int) -> None:
        """Bring an expert that was computed where it lay, for the next rows, where nothing waits for that."""
        group = self._groups[row]
        leaving = self._cache.admit(row, expert) if self._memory.has_time() else None
        if leaving is None:
            return
        for other, left in leaving:
            self._memory.drop(self._groups[other].experts[left])
        self._memory.bring(group, group.experts[expert])
        self._cache.release(row, expert)

    def _announce_next(self, row: int) -> None:
        """Let the disk go on with the next layer, after the requests of this one."""
        following = (row + 1) % len(self._groups)
        if following == self._announced:
            return  # by earlier rows of the same pass
        self._announced = following
        for expert, record in enumerate(self._groups[following].experts):
            if not self._cache.is_kept(following, expert):
                self._memory.announce(record)

    def _await(self, row: int, under_way: deque[tuple[int, Wait]], ready: deque[int]) -> None:
        """Wait for the expert that was begun first; one that cannot be read is forgotten."""
        expert, wait = under_way.popleft()
        try:
            wait()
        except BaseException:
            self._cache.forget(row, expert)
            self._memory.drop(self._groups[row].experts[expert])
            raise
        ready.append(expert)

    def _release(self, row: int, expert: int) -> None:
        self._memory.release(self._groups[row].experts[expert])
        self._cache.release(row, expert)

    def _count(self, group: ExpertGroup, *, asked: int, hits: int, in_place: int) -> None:
        before = self.counts
        self.counts = ExpertCounts(
            asked=before.asked + asked,
            hits=before.hits + hits,
            in_place=before.in_place + in_place,
            read_bytes=before.read_bytes + (asked - hits - in_place) * group.expert_stored_bytes,
        )
