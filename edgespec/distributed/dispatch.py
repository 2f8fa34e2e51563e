"""Jobs are handed to workers as they become free, and taken back from workers that are lost.

Each job has one answer in the end: a worker's, or the error of the last try. Only the jobs that workers hold are in
memory; the others are read as they are handed out. It knows nothing of how workers are reached: that is a `WorkerPool`.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic, Protocol

from edgespec.distributed.worker import Exchange, Job, JobIn, Value
from edgespec.errors import EdgespecError

MAX_TRIES = 3  # of a job
MAX_LOSSES = 3  # of a worker in a row, without an answer between
RESERVE_SHARE = 4  # texts under way for each job that waits at a worker


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJoined:
    """A worker has loaded: it takes jobs."""

    worker: str
    num_texts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAnswered(Generic[Value]):
    """An exchange with a worker has ended."""

    worker: str
    exchanged: Exchange[Value]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost:
    """A worker is gone, with all jobs that it held."""

    worker: str
    why: str
    refused: EdgespecError | None = None  # why another in its place would go the same way


class WorkerPool(Protocol[JobIn, Value]):
    """How workers are reached."""

    def give(self, worker: str, jobs: Sequence[tuple[int, JobIn]]) -> None:
        """Begin an exchange with a worker, which may already be in one."""

    def wait(self) -> Sequence[WorkerJoined | WorkerAnswered[Value] | WorkerLost]:
        """Wait until something has happened, or for a moment, and return what has."""

    def replace(self, worker: str) -> None:
        """Start another worker in the place of one that is lost, by the same name."""


@dataclass(slots=True, kw_only=True)
class _Try(Generic[Job]):
    number: int
    job: Job
    num_tries: int = 0  # before this one
    last_worker: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOutcome(Generic[Job, Value]):
    """A job with its answer, or with the error of the workers that were lost with it."""

    job: Job
    value: Value | None
    error: EdgespecError | None = None


class Dispatch(Generic[Job, Value]):
    """One run's jobs and the workers that hold them."""

    def __init__(
        self,
        jobs: Iterable[Job],
        pool: WorkerPool[Job, Value],
        workers: Iterable[str],
        *,
        log: Callable[[str], None],
        on_exchange: Callable[[str, Exchange[Value] | None], None],
    ) -> None:
        """Hand the jobs to workers, which are loading.

        `log` takes a line for people on what becomes of workers; `on_exchange` what each reported last, None once
        it is lost.
        """
        self._jobs, self._pool, self._log, self._on_exchange = enumerate(jobs, 1), pool, log, on_exchange
        self._again: deque[_Try[Job]] = deque()
        self._held: dict[str, dict[int, _Try[Job]]] = {}  # by worker, of those that take jobs
        self._losses = dict.fromkeys(workers, 0)  # of those that take jobs, or will
        self._num_texts: dict[str, int] = {}

    def run(self) -> Iterator[JobOutcome[Job, Value]]:
        """Yield every job once, as it ends; raises EdgespecError where no worker is left."""
        while not self._is_over():
            for event in self._pool.wait():
                if isinstance(event, WorkerAnswered):
                    yield from self._take(event.worker, event.exchanged)
                elif isinstance(event, WorkerLost):
                    yield from self._take_back(event)
                    self._replace(event)
                else:
                    self._join(event)
            self._hand_out_again()

    def _is_over(self) -> bool:
        if not self._again and not any(self._held.values()):
            self._again += self._read(1)  # looked ahead: it waits like those that are tried again
            return not self._again
        return False

    def _read(self, most: int) -> list[_Try[Job]]:
        return [_Try(number=number, job=job) for number, job in islice(self._jobs, most)]

    def _join(self, event: WorkerJoined) -> None:
        self._held[event.worker] = {}
        self._num_texts[event.worker] = event.num_texts
        self._give(event.worker, self._next_jobs(event.worker, event.num_texts))
        # A second exchange waits at the worker, so that it goes on while the first one's answers travel.
        if reserve := self._next_jobs(event.worker, self._room(event.worker)):
            self._give(event.worker, reserve)

    def _take(self, worker: str, exchanged: Exchange[Value]) -> list[JobOutcome[Job, Value]]:
        """Take a worker's answers, and give it other jobs before anything is done with them."""
        held, ended = self._held[worker], list[JobOutcome[Job, Value]]()
        for answer in exchanged.answers:
            self._losses[worker] = 0
            attempt = held.pop(answer.number)
            if answer.failed and answer.may_succeed_elsewhere and attempt.num_tries + 1 < MAX_TRIES:
                self._try_again(worker, attempt)
            else:
                ended.append(JobOutcome(job=attempt.job, value=answer.value))
        for note in exchanged.notes:
            self._log(f"{worker}: {note}")
        self._on_exchange(worker, exchanged)
        jobs = self._next_jobs(worker, self._room(worker))
        if jobs or held:
            self._give(worker, jobs)
        return ended

    def _take_back(self, event: WorkerLost) -> Iterator[JobOutcome[Job, Value]]:
        """Let the jobs of a worker that is lost be tried again; those that have been too often end."""
        worker = event.worker
        held = self._held.pop(worker, {}).values()
        self._on_exchange(worker, None)
        back = f"; rows that go back to the queue: {len(held)}" if held else ""
        self._log(f"{worker} is lost ({event.why}){back}")
        for attempt in held:
            if attempt.num_tries + 1 < MAX_TRIES:
                self._try_again(worker, attempt)
                continue
            self._losses[worker] = 0  # it is the row that ends workers
            what = f"{MAX_TRIES} workers were lost while this row ran, the last one {worker} ({event.why})."
            fix = "See what that machine says of it, then run the row again."
            yield JobOutcome(job=attempt.job, value=None, error=EdgespecError("E_WORKER", what, fix))

    def _replace(self, event: WorkerLost) -> None:
        """Have another worker started in the place of one that is lost; raises EdgespecError where none is left."""
        worker = event.worker
        self._losses[worker] += 1
        if event.refused is None and self._losses[worker] < MAX_LOSSES:
            self._pool.replace(worker)
            return
        del self._losses[worker]
        self._log(f"{worker} is not started again; workers that are left: {len(self._losses)}")
        if not self._losses:
            raise event.refused or EdgespecError(
                "E_WORKER",
                f"no worker is left: {worker} was lost {MAX_LOSSES} times in a row ({event.why}).",
                "See what its machine says of it, and go on with what is written.",
            )

    def _try_again(self, worker: str, attempt: _Try[Job]) -> None:
        attempt.num_tries += 1
        attempt.last_worker = worker
        self._again.append(attempt)

    def _room(self, worker: str) -> int:
        """Return how many jobs more a worker is to hold: those under way, and a small reserve."""
        num_texts = self._num_texts[worker]
        return num_texts + max(1, num_texts // RESERVE_SHARE) - len(self._held[worker])

    def _next_jobs(self, worker: str, most: int) -> list[_Try[Job]]:
        """Return jobs that this worker may have: first those that are tried again.

        A job's last try is alone on its worker: a row that ends workers must not take others with it.
        """
        held, found = self._held[worker], list[_Try[Job]]()
        if any(attempt.num_tries == MAX_TRIES - 1 for attempt in held.values()):
            return []
        for _ in range(len(self._again)):
            if len(found) >= most:
                break
            attempt = self._again.popleft()
            is_last = attempt.num_tries == MAX_TRIES - 1
            if (attempt.last_worker == worker and len(self._held) > 1) or (is_last and (held or found)):
                self._again.append(attempt)
                continue
            found.append(attempt)
            if is_last:
                return found
        return found + self._read(max(0, most - len(found)))

    def _give(self, worker: str, jobs: list[_Try[Job]]) -> None:
        self._held[worker].update((attempt.number, attempt) for attempt in jobs)
        self._pool.give(worker, [(attempt.number, attempt.job) for attempt in jobs])

    def _hand_out_again(self) -> None:
        """Give jobs that are tried again to workers that have none: no other event would hand them out."""
        for worker, held in self._held.items():
            if self._again and not held and (jobs := self._next_jobs(worker, self._room(worker))):
                self._give(worker, jobs)
