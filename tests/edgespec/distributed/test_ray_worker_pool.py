"""The pool of Ray's workers, over a stand-in for Ray whose calls are made at once."""

from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.distributed import ray_worker_pool
from edgespec.distributed.dispatch import Dispatch, WorkerJoined
from edgespec.distributed.ray_worker_pool import RayWorkerPool
from tests.edgespec.distributed.stand_ins import Doubling


class Call:
    """A call that has been made."""

    def __init__(self, value: Any) -> None:
        self.value = value


class InlineActor:
    """An actor in this process."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._actor, name)
        return SimpleNamespace(remote=lambda *arguments: Call(method(*arguments)))


def stand_in_for_ray() -> SimpleNamespace:
    def actors_of(kind: Any) -> SimpleNamespace:
        made = SimpleNamespace(remote=lambda plan: InlineActor(kind(plan)))
        return SimpleNamespace(options=lambda **_: made)

    return SimpleNamespace(
        put=lambda value: value,
        remote=actors_of,
        wait=lambda calls, num_returns=1, timeout=None: (calls[:num_returns], calls[num_returns:]),
        get=lambda call: call.value,
        kill=lambda _actor: None,
    )


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> RayWorkerPool[int, int]:
    monkeypatch.setattr(ray_worker_pool, "import_ray", stand_in_for_ray)
    return RayWorkerPool(Doubling(), num_workers=2, resources={"CPU": 1.0}, check=lambda: None)


def test_workers_are_made_load_and_answer_every_job(pool: RayWorkerPool[int, int]) -> None:
    infos, settings = pool.read_infos()
    assert len(infos) == 2
    assert settings == {}
    pool.load()
    dispatch = Dispatch(range(50), pool, pool.names, log=print, on_exchange=lambda *_: None)
    assert {outcome.job: outcome.value for outcome in dispatch.run()} == {job: 2 * job for job in range(50)}


def test_a_worker_that_takes_anothers_place_joins_with_the_settings_of_the_first(pool: RayWorkerPool[int, int]) -> None:
    pool.read_infos()
    pool.replace("worker 2")
    assert [event for _ in range(4) for event in pool.wait()] == [WorkerJoined(worker="worker 2", num_texts=4)]
