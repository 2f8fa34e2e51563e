"""Every job ends once, whatever becomes of workers; they are kept busy, and one bad row takes no others with it."""

import random
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.distributed.dispatch import MAX_LOSSES, MAX_TRIES, Dispatch, JobOutcome, WorkerLost
from edgespec.distributed.worker import Exchange
from edgespec.errors import EdgespecError
from tests.edgespec.distributed.stand_ins import Dies, Doubling, InlinePool

NAMES = ["worker 1", "worker 2", "worker 3"]


def run(pool: InlinePool, jobs: Iterator[int] | range) -> tuple[list[JobOutcome[int, int]], list[str]]:
    told: list[str] = []
    pool.read_infos()
    pool.load()
    dispatch = Dispatch(jobs, pool, pool.names, log=told.append, on_exchange=lambda _worker, _told: None)
    return list(dispatch.run()), told


def dying(chance: random.Random, share: float) -> Dies:
    return lambda _name, _jobs: chance.random() < share


@settings(max_examples=150, deadline=None)
@given(
    count=st.integers(0, 60), num_workers=st.integers(1, 3), num_texts=st.integers(1, 9), share=st.floats(0, 0.15),
    failing=st.floats(0, 0.3), seed=st.integers(0, 10_000),
)  # fmt: skip
def test_each_job_ends_once(
    count: int, num_workers: int, num_texts: int, share: float, failing: float, seed: int
) -> None:
    """Workers die and jobs fail at random moments: none is lost, none is doubled, none has another's answer."""
    chance = random.Random(seed)
    plan = Doubling(num_texts=num_texts, fails=lambda _job: chance.random() < failing)
    pool = InlinePool(plan, NAMES[:num_workers], dies=dying(chance, share))
    try:
        outcomes, _ = run(pool, range(count))
    except EdgespecError as error:
        assert error.code == "E_WORKER"  # noqa: PT017  # so many losses in a row that no worker is left
        return
    assert Counter(outcome.job for outcome in outcomes) == Counter(range(count))
    assert all(outcome.value == 2 * outcome.job for outcome in outcomes if outcome.error is None)


def test_a_worker_holds_its_texts_and_a_small_reserve() -> None:
    """Rows are read as they are handed out: the queue holds none of a million."""
    read = 0

    def rows() -> Iterator[int]:
        nonlocal read
        while read < 10_000:
            read += 1
            yield read

    pool = InlinePool(Doubling(num_texts=8), NAMES[:2])
    most_ahead, done = 0, 0
    pool.read_infos()
    pool.load()
    for _ in Dispatch(rows(), pool, pool.names, log=print, on_exchange=lambda _worker, _told: None).run():
        done += 1
        most_ahead = max(most_ahead, read - done)
    assert done == 10_000
    assert pool.most_held == {"worker 1": 10, "worker 2": 10}
    assert most_ahead <= 20


def test_a_row_that_fails_everywhere_ends_after_its_last_try() -> None:
    """With the answer of that try, which is an error's record, and after another worker has had it."""
    pool = InlinePool(Doubling(fails=lambda job: job == 5), NAMES)
    outcomes, _ = run(pool, range(20))
    assert sorted(outcome.job for outcome in outcomes) == list(range(20))
    workers = [worker for worker, jobs in pool.given if 5 in jobs]
    assert len(workers) == MAX_TRIES
    assert workers[0] != workers[1] != workers[2]


@pytest.mark.parametrize("names", [NAMES, NAMES[:1]], ids=len)
@pytest.mark.parametrize("bad", [0, 7])
def test_a_row_that_ends_workers_is_alone_in_the_end(bad: int, names: list[str]) -> None:
    """Those that were with it are answered; it has the error of its last worker."""
    pool = InlinePool(Doubling(), names, dies=lambda _name, jobs: bad in jobs)
    outcomes, told = run(pool, range(300))
    by_job = {outcome.job: outcome for outcome in outcomes}
    error = by_job.pop(bad).error
    assert error.code == "E_WORKER"
    assert "its process ended" in error.what
    assert {job: outcome.value for job, outcome in by_job.items()} == {job: 2 * job for job in by_job}
    assert len(by_job) == 299
    assert [jobs for _, jobs in pool.given if bad in jobs][-1] == [bad]
    assert sum("is lost (its process ended)" in line for line in told) == MAX_TRIES


def test_a_worker_that_only_dies_is_given_up_and_the_others_go_on() -> None:
    pool = InlinePool(Doubling(), NAMES, dies=lambda name, _jobs: name == "worker 2")
    outcomes, told = run(pool, range(400))
    assert {outcome.job: outcome.value for outcome in outcomes} == {job: 2 * job for job in range(400)}
    assert told[-1] == "worker 2 is not started again; workers that are left: 2"
    assert sum("worker 2 is lost" in line for line in told) == MAX_LOSSES


def test_a_worker_that_dies_now_and_then_is_started_again_each_time() -> None:
    calls = 0

    def dies(_name: str, _jobs: object) -> bool:
        nonlocal calls
        calls += 1
        return not calls % 20

    outcomes, told = run(InlinePool(Doubling(), NAMES[:1], dies=dies), range(200))
    assert [outcome.error for outcome in outcomes] == [None] * 200
    assert len(told) > 2 * MAX_LOSSES


def test_without_any_worker_the_run_ends_with_the_reason() -> None:
    pool = InlinePool(Doubling(), NAMES[:1], dies=lambda _name, _jobs: True)
    with pytest.raises(EdgespecError, match=r"no worker is left: worker 1 was lost 3 times in a row \(its process"):
        run(pool, range(40))


def test_a_worker_that_is_refused_is_not_started_again() -> None:
    """Its error ends the run where it was the last one, and is told where others go on."""
    refusal = EdgespecError("E_WORKER", "worker 2 would write other texts.", "Give it the same models.")

    class Refusing(InlinePool):
        def wait(self) -> list[object]:
            if "worker 2" in self.joining:
                self.joining.remove("worker 2")
                return [WorkerLost(worker="worker 2", why=refusal.what, refused=refusal)]
            return super().wait()

    outcomes, told = run(Refusing(Doubling(), NAMES[:2]), range(9))
    assert len(outcomes) == 9
    assert told[0] == "worker 2 is lost (worker 2 would write other texts.)"
    with pytest.raises(EdgespecError, match="other texts"):
        run(Refusing(Doubling(), NAMES[1:2]), range(9))


def test_what_workers_tell_is_passed_on() -> None:
    pool, heard = InlinePool(Doubling(), NAMES[:1]), list[tuple[str, Exchange[int] | None]]()
    pool.read_infos()
    pool.load()
    dispatch = Dispatch(range(3), pool, pool.names, log=print, on_exchange=lambda *told: heard.append(told))
    assert len(list(dispatch.run())) == 3
    assert [worker for worker, _ in heard] == ["worker 1"] * 3
