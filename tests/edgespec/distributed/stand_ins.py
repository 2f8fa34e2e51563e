"""Workers in this process in the place of Ray's, which die when they are told to."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from edgespec.distributed.dispatch import WorkerAnswered, WorkerJoined, WorkerLost
from edgespec.distributed.worker import Answer, Exchange, Worker, WorkerInfo, WorkerPlan, shared_settings

Dies = Callable[[str, Sequence[Any]], bool]  # a worker's name, the jobs that it has -> whether it dies of them now


class InlinePool:
    """A pool of workers that run when somebody waits for them, each in turn."""

    def __init__(self, plan: WorkerPlan[Any, Any], names: Sequence[str], *, dies: Dies = lambda _name, _jobs: False):
        self.plan, self.dies = plan, dies
        self.workers: dict[str, Worker[Any, Any]] = {name: plan.open(num_beside=len(names) - 1) for name in names}
        self.calls: dict[str, deque[Sequence[tuple[int, Any]]]] = {name: deque() for name in names}
        self.held: dict[str, dict[int, Any]] = {name: {} for name in names}
        self.turns = list(names)  # who has waited longest comes first
        self.most_held: Counter[str] = Counter()
        self.given: list[tuple[str, list[Any]]] = []
        self.joining: list[str] = []
        self.settings: Mapping[str, Any] = {}
        self.is_closed = False

    @property
    def names(self) -> list[str]:
        return list(self.workers)

    def read_infos(self) -> tuple[dict[str, WorkerInfo], dict[str, Any]]:
        infos = {name: worker.info() for name, worker in self.workers.items()}
        self.settings = shared_settings(infos)
        return infos, dict(self.settings)

    def load(self) -> None:
        self.joining = self.names

    def give(self, worker: str, jobs: Sequence[tuple[int, Any]]) -> None:
        self.calls[worker].append(jobs)
        assert len(self.calls[worker]) <= 2
        assert not self.held[worker].keys() & dict(jobs).keys()
        self.held[worker].update(jobs)
        self.most_held[worker] = max(self.most_held[worker], len(self.held[worker]))
        self.given.append((worker, [job for _, job in jobs]))

    def wait(self) -> list[Any]:
        if self.joining:
            name = self.joining.pop()
            worker = self.workers[name]
            worker.load(self.settings)
            return [WorkerJoined(worker=name, num_texts=worker.info().num_texts)]
        asked = [name for name in self.turns if self.calls[name]]
        assert asked, "somebody waits, and no worker has anything to do"
        name = asked[0]
        self.turns.remove(name)
        self.turns.append(name)
        if self.dies(name, list(self.held[name].values())):
            self.calls[name].clear()
            self.held[name].clear()
            return [WorkerLost(worker=name, why="its process ended")]
        exchanged = self.workers[name].exchange(self.calls[name].popleft(), 0.05)
        for answer in exchanged.answers:
            del self.held[name][answer.number]
        return [WorkerAnswered(worker=name, exchanged=exchanged)]

    def replace(self, worker: str) -> None:
        self.workers[worker] = self.plan.open(num_beside=len(self.workers) - 1)
        self.joining.append(worker)

    def close(self) -> None:
        self.is_closed = True


class Doubling:
    """A plan of workers without a model: a number is answered with twice as much."""

    def __init__(self, *, num_texts: int = 4, fails: Callable[[Any], bool] = lambda _job: False) -> None:
        self.num_texts, self.fails = num_texts, fails

    def open(self, *, num_beside: int) -> DoublingWorker:
        return DoublingWorker(self)


class DoublingWorker:
    def __init__(self, plan: Doubling) -> None:
        self.plan, self.waiting = plan, deque[tuple[int, int]]()

    def info(self) -> WorkerInfo:
        return WorkerInfo(settings={}, versions={}, num_texts=self.plan.num_texts, shared={})

    def load(self, settings: Mapping[str, Any]) -> None:
        pass

    def exchange(self, jobs: Sequence[tuple[int, int]], wait_s: float) -> Exchange[int]:
        """One job an exchange, the youngest first: nothing may lean on an order."""
        self.waiting.extend(jobs)
        if not self.waiting:
            return Exchange()
        number, job = self.waiting.pop()
        return Exchange(answers=[Answer(number=number, value=2 * job, failed=self.plan.fails(job))])
