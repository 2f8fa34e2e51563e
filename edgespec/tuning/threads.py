"""The number of threads that the steps of a text are computed with, on a CPU.

OpenMP's threads spin while they wait for each other. That is the fastest way where each has a core of its own; where
another program takes one of the cores, all of them wait for the thread that was put aside, at every operation. And a
small model's operations are so short that one thread may be the fastest anyway. So what the system says about other
programs decides where to begin, and the seconds of the steps decide what is best there. Both change what a step
takes, and nothing of what it yields but the rounding of sums.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import psutil
import torch

from edgespec.machine.cpu import chosen_by, read_cpu
from edgespec.machine.device import most_threads

WINDOW_S = 0.3  # that others' load is read over: the system counts it in hundredths
MAX_COST = 0.015  # of the time, for steps with numbers of threads that turn out slower
REST_STEPS = 20  # between two trials
SAVED_STEPS = 30  # whose time may be saved up for trials
PAIRS = (3, 16)  # of steps that a trial compares: fewer decide nothing, more are not made
CLEARLY_SLOWER = 1.5  # in its first pair: the trial ends
MAX_SLOWER = 20.0
MIN_SPREAD = 0.1  # of the logarithms of the pairs' ratios: three that happen to be equal prove little
ERRORS = 2.5  # standard errors that decide
UNKNOWN_COST = 3.0  # of a step with more threads than are known to pay, in steps


class OthersLoad:
    """The time that other programs take of some processors."""

    def __init__(self, processors: Sequence[int]) -> None:
        self._processors = processors
        self._at_s, self._taken_s = self._read()

    def __call__(self) -> float | None:
        """Return how many processors others kept busy since the last answer; None where that was a moment ago."""
        if time.perf_counter() - self._at_s < WINDOW_S:  # to ask the system takes a part of a short step
            return None
        at_s, taken_s = self._read()
        found = (taken_s - self._taken_s) / (at_s - self._at_s)
        self._at_s, self._taken_s = at_s, taken_s
        return max(0.0, found)

    def _read(self) -> tuple[float, float]:
        times = psutil.cpu_times(percpu=True)
        busy_s = sum(_busy_s(times[number]) for number in self._processors if number < len(times))
        return time.perf_counter(), busy_s - time.process_time()


@dataclass(slots=True)
class _Contest:
    """Numbers of threads for steps of one size: one is in use, and now and then the next ones are tried.

    A trial compares pairs of neighbouring steps, so that a machine that becomes slow for a while slows both alike, and
    judges their median, so that one hiccup moves nothing.
    """

    counts: tuple[int, ...]  # ascending
    best: int  # place of the one in use
    rival: int | None = None  # place of the one on trial
    saved_s: float = 0.0  # for trials
    rested: int = 0  # steps since the last trial
    taken: int = 0  # steps of the trial
    first_s: float = 0.0  # of the pair's first step
    ratios: list[float] = field(default_factory=list)  # logarithms of the rival's seconds over the best's, a pair each
    slower: dict[int, float] = field(default_factory=dict)  # place -> by what share its steps were last slower
    recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=9))  # of steps with the best

    @property
    def count(self) -> int:
        """Return the number of threads for the next step: in a trial the best, the rival, the rival, the best, ..."""
        is_rivals = self.rival is not None and self.taken % 4 in {1, 2}
        return self.counts[self.rival if is_rivals and self.rival is not None else self.best]

    def learn(self, seconds: float) -> None:
        """Note what the step with `count` threads took."""
        if self.rival is None:
            self.recent_s.append(seconds)
            self.rested += 1
            usual_s = statistics.median(self.recent_s)
            self.saved_s = min(self.saved_s + MAX_COST * seconds, SAVED_STEPS * usual_s)
            if self.rested >= REST_STEPS:
                self.rival = self._affordable(usual_s)
            return
        self.taken += 1
        if self.taken % 2:
            self.first_s = seconds
            return
        best_s, rival_s = (self.first_s, seconds) if self.taken % 4 == 2 else (seconds, self.first_s)
        self.saved_s -= max(0.0, rival_s - statistics.median(self.recent_s))
        self.ratios.append(math.log(rival_s / best_s))
        self._judge()

    def stop_trial(self) -> None:
        """Forget the pairs of a trial: what follows is another situation."""
        self.rival, self.rested, self.taken, self.ratios = None, 0, 0, []

    def _affordable(self, usual_s: float) -> int | None:
        """Return the place beside the best one that was tried longest ago, of those whose trial is paid for."""
        beside = [index for index in (self.best - 1, self.best + 1) if 0 <= index < len(self.counts)]
        for index in sorted(beside, key=lambda index: list(self.slower).index(index) if index in self.slower else -1):
            slower = self.slower.get(index, self._unknown_cost(index))
            num_pairs = 1 if slower >= CLEARLY_SLOWER - 1 else PAIRS[0]
            if self.saved_s >= num_pairs * slower * usual_s:
                return index
        return None

    def _unknown_cost(self, index: int) -> float:
        return self.counts[self.best] / self.counts[index] - 1 if index < self.best else UNKNOWN_COST

    def _judge(self) -> None:
        """End the trial where its pairs decide it, or where it has cost enough."""
        assert self.rival is not None
        num_pairs, middle = len(self.ratios), statistics.median(self.ratios)
        spread = 1.4826 * statistics.median(abs(ratio - middle) for ratio in self.ratios)  # of a normal distribution
        error = 1.25 * max(spread, MIN_SPREAD) / math.sqrt(num_pairs)
        is_faster = num_pairs >= PAIRS[0] and middle < -ERRORS * error
        is_slower = num_pairs >= PAIRS[0] and middle > ERRORS * error
        is_hopeless = num_pairs == 1 and middle > math.log(CLEARLY_SLOWER)
        if not (is_faster or is_slower or is_hopeless or num_pairs == PAIRS[1] or self.saved_s < 0):
            return
        tried = self.best if is_faster else self.rival
        if is_faster:
            self.best = self.rival
            self.recent_s.clear()
        self.slower.pop(tried, None)  # the last one in this order was tried last
        self.slower[tried] = min(MAX_SLOWER, max(0.0, math.exp(abs(middle) if is_faster else middle) - 1))
        self.stop_trial()


class ThreadTuner:
    """Chooses the threads of every step by what other programs leave free, and by what steps have taken."""

    def __init__(self, most: int, *, processors: int, others: Callable[[], float | None]) -> None:
        """`most` threads pay on an idle machine with these `processors`; `others` keep some of them busy, if known."""
        self._most, self._processors, self._others = most, processors, others
        self._contests: dict[tuple[int, int], _Contest] = {}
        self._size = 0  # of the last step's rows
        self.free = most  # threads that have a core of their own
        self.look()

    @property
    def count(self) -> int:
        """Return the number of threads for a step like the last one."""
        return self._contest().count

    def learn(self, seconds: float, rows: int) -> None:
        """Note the seconds of a step with `count` threads, in which the target read this number of rows."""
        # Steps of half the rows are compared with each other alone. One of another size was made on a wrong guess.
        size = rows.bit_length()
        if size == self._size:
            self._contest().learn(seconds)
        self._size = size
        self.look()

    def forget(self) -> None:
        """Forget what steps have taken."""
        self._contests = {}

    def look(self) -> None:
        """Note what other programs take now."""
        taken = self._others()
        if taken is None:
            return
        free = min(self._most, max(1, math.floor(self._processors - taken + 0.5)))
        if free != self.free:
            self._contest().stop_trial()
            self.free = free

    def _contest(self) -> _Contest:
        """Return the contest of this load and this size of steps, which begins with a thread a free core."""
        key = (self.free, self._size)
        if key not in self._contests:
            counts = tuple(sorted({1, (self.free + 1) // 2, self.free, self._most}))
            self._contests[key] = _Contest(counts=counts, best=counts.index(self.free))
        return self._contests[key]


def make_tuner(threads: int | None, device: torch.device) -> ThreadTuner | None:
    """Have torch use this number of threads; None leaves it to the returned tuner.

    There is none where the user has chosen by the environment, where the device is no CPU, or for a single core.
    """
    if threads is not None:
        torch.set_num_threads(threads)
        return None
    if chosen_by(os.environ) or device.type != "cpu":
        return None
    most, allowed = most_threads(None, device) or 1, read_cpu().allowed
    torch.set_num_threads(most)
    return ThreadTuner(most, processors=len(allowed), others=OthersLoad(allowed)) if most > 1 else None


def _busy_s(times: object) -> float:
    """Return the seconds in which a processor was not idle; those of guests are counted among the users'."""
    idle = ("idle", "iowait", "guest", "guest_nice")
    return float(sum(times)) - sum(getattr(times, name, 0.0) for name in idle)  # type: ignore[call-overload]
