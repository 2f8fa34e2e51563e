"""Workers as Ray's actors, one process each: they are started, called, and replaced when they are lost."""

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic

from edgespec.distributed.cluster import import_ray
from edgespec.distributed.dispatch import WorkerAnswered, WorkerJoined, WorkerLost
from edgespec.distributed.worker import Exchange, Job, Value, WorkerInfo, WorkerPlan, check_joining, shared_settings
from edgespec.errors import EdgespecError, is_out_of_memory, unexpected
from edgespec.machine.environment import set_up_environment

START_S = 300.0  # until a worker must run
EXCHANGE_S = 2.0  # most seconds until a worker reports how it goes
LOOK_S = 0.2  # between checks whether the run is to end


class Actor(Generic[Job, Value]):
    """The process of one worker. Its methods are the worker's; an error of its own is returned whole."""

    def __init__(self, plan: WorkerPlan[Job, Value]) -> None:
        set_up_environment()
        self._plan = plan

    def where(self) -> str:
        """Return the machine's name."""
        return socket.gethostname()

    def info(self, num_beside: int) -> WorkerInfo | EdgespecError:
        """Make the worker, which shares its machine with `num_beside` others, and return its info."""
        try:
            self._worker = self._plan.open(num_beside=num_beside)
            return self._worker.info()
        except Exception as error:
            return _readable(error)

    def load(self, settings: Mapping[str, Any]) -> EdgespecError | None:
        """Read the weights."""
        try:
            self._worker.load(settings)
        except Exception as error:
            return _readable(error)
        return None

    def exchange(self, jobs: Sequence[tuple[int, Job]]) -> Exchange[Value]:
        """Take jobs and return answers."""
        return self._worker.exchange(jobs, EXCHANGE_S)


@dataclass(slots=True, kw_only=True)
class _WorkerProcess:
    """A name's worker; another takes its place once it is lost."""

    name: str
    actor: Any
    host: str = ""
    info: WorkerInfo | None = None
    started: float = field(default_factory=time.monotonic)
    is_loaded: bool = False
    pending: dict[Any, str] = field(default_factory=dict)  # calls under way -> their method


class RayWorkerPool(Generic[Job, Value]):
    """Workers on a cluster; close it, or they go on until the connection ends."""

    def __init__(
        self,
        plan: WorkerPlan[Job, Value],
        *,
        num_workers: int,
        resources: Mapping[str, float],
        check: Callable[[], None],
    ) -> None:
        """Ask for workers, each with these resources; `check` may raise to end any waiting."""
        self._ray, self._check = import_ray(), check
        self._plan = self._ray.put(plan)
        amounts = dict(resources)
        self._options = {
            "num_cpus": amounts.pop("CPU", 0.0),
            "num_gpus": amounts.pop("GPU", 0.0),
            "resources": amounts,
            "scheduling_strategy": "SPREAD",
            "max_restarts": 0,  # the dispatch decides on that
        }
        self._settings: dict[str, Any] = {}
        self._first: tuple[str, WorkerInfo] | None = None
        self._workers = {name: self._start(name) for name in (f"worker {n}" for n in range(1, num_workers + 1))}

    def read_infos(self) -> tuple[dict[str, WorkerInfo], dict[str, Any]]:
        """Wait for the infos of all workers, and return them with the settings that they share.

        No weight is read. Raises EdgespecError where one cannot run, or would write other texts.
        """
        for worker in self._workers.values():
            self._get(worker, "where")
        for worker in self._workers.values():
            self._ask(worker, "info", self._num_beside(worker))
        for worker in self._workers.values():
            self._get(worker, "info")
        infos = {self.named(worker.name): worker.info for worker in self._workers.values() if worker.info is not None}
        self._settings = shared_settings(infos)
        self._first = next(iter(infos.items()))
        return infos, self._settings

    def load(self) -> None:
        """Let all workers read their weights; they join as they have."""
        for worker in self._workers.values():
            self._ask(worker, "load", self._settings)

    def named(self, name: str) -> str:
        """Return a worker's name with its machine's."""
        worker = self._workers[name]
        return f"{name} on {worker.host}" if worker.host else name

    @property
    def names(self) -> list[str]:
        """Return the workers' names."""
        return list(self._workers)

    def give(self, worker: str, jobs: Sequence[tuple[int, Job]]) -> None:
        """Begin an exchange with a worker."""
        self._ask(self._workers[worker], "exchange", list(jobs))

    def wait(self) -> list[WorkerJoined | WorkerAnswered[Value] | WorkerLost]:
        """Wait until something has happened, or for a moment, and return what has."""
        self._check()
        calls = {call: worker for worker in self._workers.values() for call in worker.pending}
        ready, _ = self._ray.wait(list(calls), num_returns=1, timeout=LOOK_S) if calls else ([], [])
        if ready:
            ready, _ = self._ray.wait(list(calls), num_returns=len(calls), timeout=0)
        events: list[WorkerJoined | WorkerAnswered[Value] | WorkerLost] = []
        for call in ready:
            worker = calls[call]
            if call in worker.pending:  # else its worker was lost just now
                event = self._event(worker, call)
                if event is not None:
                    events.append(event)
        now = time.monotonic()
        late = [worker for worker in self._workers.values() if "where" in worker.pending.values()]
        events += [self._lost(worker, _late()) for worker in late if now - worker.started > START_S]
        return events

    def replace(self, worker: str) -> None:
        """Start another worker in the place of one that is lost."""
        self._workers[worker] = self._start(worker)

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers.values():
            self._kill(worker)

    def _start(self, name: str) -> _WorkerProcess:
        worker = _WorkerProcess(name=name, actor=self._ray.remote(Actor).options(**self._options).remote(self._plan))
        self._ask(worker, "where")
        return worker

    def _num_beside(self, worker: _WorkerProcess) -> int:
        """Return how many others on a worker's machine have not taken their memory yet."""
        others = (other for other in self._workers.values() if other is not worker)
        return sum(other.host == worker.host and not other.is_loaded for other in others)

    def _ask(self, worker: _WorkerProcess, what: str, *arguments: Any) -> None:
        worker.pending[getattr(worker.actor, what).remote(*arguments)] = what

    def _get(self, worker: _WorkerProcess, what: str) -> None:
        """Wait for one of the first answers of a worker; raises EdgespecError where there is none."""
        call = next(call for call, asked in worker.pending.items() if asked == what)
        while not self._ray.wait([call], timeout=LOOK_S)[0]:
            self._check()
            if what == "where" and time.monotonic() - worker.started > START_S:
                raise _late()
        event = self._event(worker, call)
        if isinstance(event, WorkerLost):
            raise event.refused or EdgespecError(
                "E_WORKER",
                f"{self.named(worker.name)} could not be started ({event.why}).",
                "edgespec and its libraries must be installed on each machine, in the Python that runs Ray there.",
            )

    def _event(self, worker: _WorkerProcess, call: Any) -> WorkerJoined | WorkerAnswered[Value] | WorkerLost | None:
        """Take a call's answer, go on with a worker that is being started, and return what the dispatch is to know."""
        what = worker.pending.pop(call)
        try:
            answer = self._ray.get(call)
        except Exception as error:
            return self._lost(worker, _lost_because(error))
        if isinstance(answer, EdgespecError):
            text = f"{self.named(worker.name)}: {answer.what}"
            return self._lost(worker, EdgespecError(answer.code, text, answer.fix))
        if what == "where":
            worker.host = answer
            if self._first is not None:
                self._ask(worker, "info", self._num_beside(worker))
        elif what == "info":
            worker.info = answer
            if self._first is not None:
                try:
                    check_joining(self.named(worker.name), answer, *self._first)
                except EdgespecError as error:
                    return self._lost(worker, error)
                self._ask(worker, "load", self._settings)
        elif what == "load":
            worker.is_loaded = True
            return WorkerJoined(worker=worker.name, num_texts=worker.info.num_texts if worker.info else 1)
        else:
            return WorkerAnswered(worker=worker.name, exchanged=answer)
        return None

    def _lost(self, worker: _WorkerProcess, why: str | EdgespecError) -> WorkerLost:
        self._kill(worker)
        worker.pending.clear()
        refused = why if isinstance(why, EdgespecError) else None
        return WorkerLost(worker=worker.name, why=why if isinstance(why, str) else why.what, refused=refused)

    def _kill(self, worker: _WorkerProcess) -> None:
        try:
            self._ray.kill(worker.actor)
        except Exception:  # it is gone, which is the aim
            return


def _readable(error: Exception) -> EdgespecError:
    """Return an error as one for people."""
    if isinstance(error, EdgespecError):
        return error
    if is_out_of_memory(error):
        return EdgespecError("E_MEMORY", "memory ran out while the models were loaded.", "Lower the memory's limits.")
    return unexpected(error)


def _lost_because(error: Exception) -> str:
    """Return in a few words why a worker is gone."""
    text = str(error)
    if "OutOfMemoryError" in (named := type(error).__name__) or "running low on memory" in text:
        return "its machine ran out of memory"
    if "node has died" in text or "node was terminated" in text:
        return "its machine is gone"
    return {"ActorDiedError": "its process ended", "ActorUnavailableError": "it does not answer"}.get(
        named, f"{named}: {(text.strip() or named).splitlines()[0][:160]}"
    )


def _late() -> EdgespecError:
    return EdgespecError(
        "E_CLUSTER",
        f"a worker did not start within {START_S:.0f} s.",
        "Others may hold what the cluster has (ray status). Use fewer workers, or ask for less with `resources`.",
    )
