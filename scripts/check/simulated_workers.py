"""What 64 workers would make of a million rows: are they busy, and what does it take of the machine that hands out?

    python -m scripts.check.simulated_workers --rows 1000000

The dispatch is the one that runs; workers are stand-ins on a clock of their own. Each has so many texts under way, its
speed is one of a range of ten to one, and texts differ in length as one to sixteen. One answer in a hundred is an
error, and workers are lost now and then (their rows go back), to be there again after a minute. A worker works only
while an exchange with it is open, as a real one does, and messages travel for a few milliseconds.

Busy is the share of all places for texts, from the first worker's start to the end of the last text, that were in use
by texts whose answers counted; `while rows last` is the same until the last row was handed out. Processor seconds are
those of the dispatch alone; Ray's own are measured by `scripts.check.ray --only overhead`. The last line is JSON.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from edgespec.distributed.dispatch import Dispatch, WorkerAnswered, WorkerJoined, WorkerLost
from edgespec.distributed.ray_worker_pool import EXCHANGE_S
from edgespec.distributed.worker import Answer, Exchange

TRAVEL_S = 0.004  # of a message
LOAD_S = 60.0  # of a worker that is started again
SHORTEST_TOKENS, LONGEST_TOKENS = 32, 512
SLOWEST_TOKENS_PER_S = 4.0  # of one text; the fastest worker makes ten times as many
SPREAD = 10.0
Event = WorkerJoined | WorkerAnswered[int] | WorkerLost


@dataclass(slots=True)
class StandIn:
    """A worker without a model. Its clock stands still while no exchange is open."""

    tokens_per_s: float
    num_texts: int
    exchanges: deque[Sequence[tuple[int, Any]]] = field(default_factory=deque)
    waiting: deque[int] = field(default_factory=deque)
    texts: list[tuple[float, float, int]] = field(default_factory=list)  # end, seconds, number, by its own clock
    clock_s: float = 0.0
    life: int = 0  # how often it was lost: what was sent before arrives nowhere
    is_open: bool = False
    used_s: float = 0.0  # by texts that ended


class SimulatedPool:
    """Stand-ins, and the messages that are on their way."""

    def __init__(self, num_workers: int, *, num_texts: int, failing: float, hours_between_losses: float, seed: int):
        self.chance, self.failing, self.mean_loss_s = random.Random(seed), failing, 3600 * hours_between_losses
        self.workers = {
            f"worker {n}": StandIn(SLOWEST_TOKENS_PER_S * SPREAD ** (n / max(1, num_workers - 1)), num_texts)
            for n in range(num_workers)
        }
        self.now_s = self.spent_s = 0.0
        self.num_losses = 0
        self._coming: list[tuple[float, int, int, str, str, Any]] = []
        self._count = 0
        for name in self.workers:
            self._send(0.0, name, "join", None)
            self._send(self.chance.expovariate(1 / self.mean_loss_s), name, "lose", None)

    def give(self, worker: str, jobs: Sequence[tuple[int, Any]]) -> None:
        """Send jobs."""
        began = time.process_time()
        self._send(TRAVEL_S, worker, "jobs", jobs)
        self.spent_s += time.process_time() - began

    def wait(self) -> list[Event]:
        """Go on to the next message that arrives at the dispatch."""
        began = time.process_time()
        event = None
        while event is None:
            self.now_s, _, life, name, what, content = heapq.heappop(self._coming)
            if life == self.workers[name].life:
                event = self._happen(name, what, content)
        self.spent_s += time.process_time() - began
        return [event]

    def replace(self, worker: str) -> None:
        """Start another worker."""
        self._send(LOAD_S, worker, "join", None)
        self._send(LOAD_S + self.chance.expovariate(1 / self.mean_loss_s), worker, "lose", None)

    def _happen(self, name: str, what: str, content: Any) -> Event | None:
        worker = self.workers[name]
        if what == "join":
            return WorkerJoined(worker=name, num_texts=worker.num_texts)
        if what == "told":
            return WorkerAnswered(worker=name, exchanged=content)
        if what == "lose":
            worker.life += 1
            self.num_losses += 1
            worker.exchanges.clear()
            worker.waiting.clear()
            worker.texts.clear()
            worker.is_open = False
            return WorkerLost(worker=name, why="its process ended")
        if what == "jobs":
            worker.exchanges.append(content)
        else:
            self._end_exchange(name, worker, content)
        if not worker.is_open and worker.exchanges:
            self._begin_exchange(name, worker)
        return None

    def _begin_exchange(self, name: str, worker: StandIn) -> None:
        worker.is_open = True
        worker.waiting.extend(number for number, _ in worker.exchanges.popleft())
        self._let_in(worker)
        until_s = worker.texts[0][0] - worker.clock_s if worker.texts else 0.0
        self._send(min(until_s, EXCHANGE_S), name, "end", min(until_s, EXCHANGE_S))

    def _end_exchange(self, name: str, worker: StandIn, lasted_s: float) -> None:
        worker.is_open = False
        worker.clock_s += lasted_s
        answers = []
        while worker.texts and worker.texts[0][0] <= worker.clock_s + 1e-9:
            _, seconds, number = heapq.heappop(worker.texts)
            failed = self.chance.random() < self.failing
            worker.used_s += 0.0 if failed else seconds
            answers.append(Answer(number=number, value=number, failed=failed))
        self._send(TRAVEL_S, name, "told", Exchange(answers=answers))

    def _let_in(self, worker: StandIn) -> None:
        while worker.waiting and len(worker.texts) < worker.num_texts:
            seconds = self.chance.uniform(SHORTEST_TOKENS, LONGEST_TOKENS) / worker.tokens_per_s
            heapq.heappush(worker.texts, (worker.clock_s + seconds, seconds, worker.waiting.popleft()))

    def _send(self, after_s: float, worker: str, what: str, content: Any) -> None:
        self._count += 1
        life = self.workers[worker].life
        heapq.heappush(self._coming, (self.now_s + after_s, self._count, life, worker, what, content))


def rows(count: int) -> Iterator[dict[str, Any]]:
    """Make rows as they are asked for, as a file's lines are read."""
    for index in range(count):
        yield {"id": f"row-{index}", "prompt": "x" * 400 + str(index)}


def main() -> int:
    """Run the simulation and print what it found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--texts", type=int, default=16, help="under way at each worker")
    parser.add_argument("--failing", type=float, default=0.01)
    parser.add_argument("--hours-between-losses", type=float, default=2.0, help="of one worker")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    pool = SimulatedPool(
        asked.workers, num_texts=asked.texts, failing=asked.failing, hours_between_losses=asked.hours_between_losses,
        seed=asked.seed,
    )  # fmt: skip
    process = psutil.Process()
    before_bytes = process.memory_info().rss
    dispatch = Dispatch(rows(asked.rows), pool, pool.workers, log=lambda _text: None, on_exchange=_ignore)
    began, most_bytes, done, failed = time.process_time(), before_bytes, 0, 0
    used_s = last_handed_s = 0.0
    for outcome in dispatch.run():
        done += 1
        failed += outcome.error is not None
        if done == asked.rows - asked.workers * asked.texts:
            used_s, last_handed_s = sum(worker.used_s for worker in pool.workers.values()), pool.now_s
        if not done % 10_000:
            most_bytes = max(most_bytes, process.memory_info().rss)
    dispatch_s = time.process_time() - began - pool.spent_s
    places = asked.workers * asked.texts
    told = {
        "rows": asked.rows,
        "workers": asked.workers,
        "done": done,
        "lost_with_three_workers": failed,
        "losses": pool.num_losses,
        "simulated_s": round(pool.now_s),
        "busy": round(sum(worker.used_s for worker in pool.workers.values()) / places / pool.now_s, 4),
        "busy_while_rows_last": round(used_s / places / last_handed_s, 4) if last_handed_s else None,
        "dispatch_processor_s": round(dispatch_s, 1),
        "dispatch_processor_us_a_row": round(1e6 * dispatch_s / asked.rows, 1),
        "memory_added_mib": round((most_bytes - before_bytes) / (1 << 20), 1),
    }
    for name, value in told.items():
        print(f"{name:32} {value}")
    print(json.dumps(told))
    return 0 if done == asked.rows else 1


def _ignore(_worker: str, _told: object) -> None:
    return


if __name__ == "__main__":
    sys.exit(main())
