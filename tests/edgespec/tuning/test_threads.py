"""The number of threads follows what other programs leave free, and what steps take; trials cost little."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import psutil
import pytest
import torch

from edgespec import Engine, TreeSettings
from edgespec.decode.batch import Outcome
from edgespec.decode.threaded_step import with_threads
from edgespec.machine import device
from edgespec.machine.cpu import Cpu
from edgespec.machine.device import most_threads
from edgespec.tuning import threads
from edgespec.tuning.step import StepResult
from edgespec.tuning.threads import OthersLoad, ThreadTuner, make_tuner

CPU = torch.device("cpu")
TREE = 65  # rows
STEP = StepResult(tokens=(1,), finish=None, num_drafted=64, is_prefill=False, grow_s=0.01, target_s=0.02, rest_s=0.0)

SESSION: Any = None  # whose step it is does not matter here


@dataclass
class Machine:
    """A simulated machine that decodes steps, with a clock of its own; `others` says what other programs take when."""

    step_s: Callable[[int, float], float]  # of so many threads at such a time
    most: int = 2
    others: Callable[[float], float] | None = None  # None: the system does not tell
    noise: float = 0.1  # standard deviation of the steps' logarithms
    seed: int = 0
    at_s: float = 0.0
    looked_s: float = 0.0
    counts: list[int] = field(default_factory=list)  # threads of each step
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tuner = ThreadTuner(self.most, processors=self.most, others=self._look)
        self._random = random.Random(self.seed)

    def _look(self) -> float | None:
        if self.others is None or self.at_s - self.looked_s < threads.WINDOW_S:
            return None
        self.looked_s = self.at_s
        return self.others(self.at_s)

    def run(self, until_s: float, *, rows: int = TREE) -> list[int]:
        """Take steps until then, and return the threads of each."""
        first = len(self.counts)
        while self.at_s < until_s:
            count = self.tuner.count
            seconds = self.step_s(count, self.at_s) * self._random.lognormvariate(0, self.noise)
            self.at_s += seconds
            self.counts.append(count)
            self.seconds.append(seconds)
            self.tuner.learn(seconds, rows)
        return self.counts[first:]


def idle(count: int, _at_s: float) -> float:
    """Two threads are faster by 15 %."""
    return {1: 0.023, 2: 0.020}[count]


def spell(count: int, at_s: float) -> float:
    """Another program takes a core from second 20 to 60."""
    return {1: 0.023, 2: 0.2}[count] if 20 < at_s < 60 else idle(count, at_s)


def test_a_busy_spell_is_noticed_at_once_and_so_is_its_end() -> None:
    machine = Machine(spell, others=lambda at_s: 1.0 if 20 < at_s < 60 else 0.05)
    assert statistics.mode(machine.run(20)) == 2
    machine.run(20.7)
    assert set(machine.run(22)) == {1}
    machine.run(60.4)
    after = machine.run(62)
    assert after.count(2) > 0.9 * len(after)


@pytest.mark.parametrize("seed", range(5))
def test_where_the_system_tells_nothing_the_steps_seconds_do(seed: int) -> None:
    machine = Machine(spell, seed=seed)
    machine.run(40)
    busy = machine.run(60)
    assert busy.count(1) > 0.95 * len(busy)
    machine.run(100)
    after = machine.run(160)
    assert after.count(2) > 0.9 * len(after)


def test_a_step_beside_a_neighbour_takes_what_one_thread_takes() -> None:
    machine = Machine(spell, others=lambda at_s: 1.0 if 20 < at_s < 60 else 0.0)
    machine.run(21)
    first = len(machine.seconds)
    machine.run(60)
    took = machine.seconds[first:]
    assert sum(took) / len(took) < 0.023 * 1.03


@pytest.mark.parametrize("slower", [1.15, 2.0, 10.0])
@pytest.mark.parametrize("seed", range(3))
def test_trials_cost_less_than_two_percent(slower: float, seed: int) -> None:
    machine = Machine(lambda count, _at_s: 0.02 if count == 2 else 0.02 * slower, seed=seed)
    machine.run(60)
    assert 1 in machine.counts  # there were trials
    extra = sum(seconds for seconds, count in zip(machine.seconds, machine.counts, strict=True) if count == 1)
    assert extra * (1 - 1 / slower) < 0.02 * sum(machine.seconds)


def test_one_thread_that_is_faster_on_an_idle_machine_is_found() -> None:
    machine = Machine(lambda count, _at_s: {1: 0.005, 2: 0.006}[count], others=lambda _at_s: 0.0)
    machine.run(5)
    after = machine.run(20)
    assert after.count(1) > 0.9 * len(after)


def test_one_hiccup_moves_nothing() -> None:
    """In a trial, of the best or of the rival, and outside of one."""
    for at in range(60, 100):
        calls = itertools.count()
        machine = Machine(
            lambda count, at_s, at=at, calls=calls: idle(count, at_s) * (50 if next(calls) == at else 1), noise=0.0
        )
        while len(machine.counts) < 120:
            machine.run(machine.at_s + 1e-9)
            used = machine.tuner._contest()
            assert used.counts[used.best] == 2
        assert 1 in machine.counts  # there was a trial


def test_a_step_of_another_size_than_the_last_is_no_evidence() -> None:
    tuner = ThreadTuner(2, processors=2, others=lambda: None)
    for seconds, rows in [(0.01, TREE), (0.01, TREE), (9.0, 1), (0.002, 1)]:
        tuner.learn(seconds, rows)
    assert [list(contest.recent_s) for contest in tuner._contests.values() if contest.recent_s] == [[0.01], [0.002]]


def test_many_cores_lose_no_more_than_the_neighbour_takes() -> None:
    machine = Machine(lambda count, _at_s: 0.1 * 16 / count, most=16, others=lambda at_s: 0.0 if at_s < 5 else 1.0)
    machine.run(4.5)
    assert statistics.mode(machine.counts) == 16
    machine.run(6)
    assert statistics.mode(machine.run(30)) in {15, 16}


def test_steps_of_each_size_have_their_own_number() -> None:
    """Plain passes are short, and one thread is best; trees are not."""
    machine = Machine(lambda count, _at_s: {1: 0.005, 2: 0.01}[count])
    machine.run(5, rows=1)
    assert machine.tuner.count == 1
    machine.step_s = idle
    machine.run(5.1)
    assert machine.tuner.count == 2


def test_others_load_is_what_this_process_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    Times = type(psutil.cpu_times())  # noqa: N806
    zero = Times(*[0.0] * len(Times._fields))
    clock = {"wall": 0.0, "own": 0.0, "busy": [0.0, 0.0, 0.0]}
    monkeypatch.setattr(threads.time, "perf_counter", lambda: clock["wall"])
    monkeypatch.setattr(threads.time, "process_time", lambda: clock["own"])
    monkeypatch.setattr(
        psutil, "cpu_times", lambda percpu: [zero._replace(user=busy, idle=9.0) for busy in clock["busy"]]
    )
    load = OthersLoad((0, 2))
    clock.update(wall=0.1, own=0.1, busy=[0.1, 0.0, 0.1])
    with monkeypatch.context() as patched:
        patched.delattr(psutil, "cpu_times")  # each step asks: the system's answer takes a part of a short one
        assert load() is None  # too short to tell
    clock.update(wall=1.0, own=1.2, busy=[1.0, 0.7, 1.0])
    assert load() == pytest.approx(0.8)  # of the second processor, which is not ours, nothing
    clock.update(wall=2.0, own=3.3, busy=[2.0, 0.7, 2.0])
    assert load() == 0.0


def cores(**changed: object) -> Cpu:
    return replace(Cpu(machine=8, allowed=tuple(range(8)), physical=4, quota=None), **changed)


def see(monkeypatch: pytest.MonkeyPatch, read: Callable[[], Cpu]) -> None:
    for module in (threads, device):
        monkeypatch.setattr(module, "read_cpu", read)


@pytest.fixture
def _no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    see(monkeypatch, cores)
    torch.set_num_threads(6)


@pytest.mark.usefixtures("_no_choice")
def test_auto_has_a_thread_a_core_and_no_more_than_torch_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    tuner = make_tuner(None, CPU)
    assert (tuner.free, torch.get_num_threads()) == (4, 4)
    torch.set_num_threads(3)
    tuner = make_tuner(None, CPU)
    assert (tuner.free, torch.get_num_threads()) == (3, 3)
    see(monkeypatch, lambda: cores(quota=1.5))
    assert make_tuner(None, CPU) is None
    assert torch.get_num_threads() == 1


@pytest.mark.usefixtures("_no_choice")
def test_the_most_threads_of_a_run_are_known_before_it() -> None:
    """A profile is matched by them."""
    assert (most_threads(None, CPU), most_threads(2, CPU)) == (4, 2)
    assert most_threads(2, torch.device("cuda", 0)) is None
    make_tuner(None, CPU)
    assert most_threads(None, CPU) == 4


@pytest.mark.usefixtures("_no_choice")
def test_what_the_user_chose_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_tuner(2, CPU) is None
    assert torch.get_num_threads() == 2
    assert make_tuner(None, torch.device("cuda", 0)) is None
    torch.set_num_threads(6)
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    assert make_tuner(None, CPU) is None
    assert torch.get_num_threads() == 6
    assert make_tuner(1, CPU) is None
    assert torch.get_num_threads() == 1


def test_steps_run_with_the_tuners_threads_and_torch_has_its_own_between_them() -> None:
    torch.set_num_threads(3)
    taken: list[float] = [0.0]
    tuner = ThreadTuner(2, processors=2, others=lambda: taken[0])
    seen: list[int] = []
    tuner._contest().best = 0  # one thread for short steps

    def step() -> list[Outcome]:
        seen.append(torch.get_num_threads())
        if len(seen) == 4:
            raise RuntimeError
        return [Outcome(sequence=SESSION, step=STEP)]

    for number, reads in enumerate([True, False, False, False]):
        with pytest.raises(RuntimeError) if number == 3 else nullcontext():
            with_threads(step, tuner, reads=reads)
        assert torch.get_num_threads() == 3
        taken[0] = float(number > 0)
    assert seen == [2, 1, 2, 1]  # a prompt, a step of unknown size, a tree, and one beside another program


def test_the_size_of_a_step_is_that_of_all_texts_that_shared_it() -> None:
    tuner = ThreadTuner(2, processors=2, others=lambda: None)
    told: list[int] = []
    tuner.learn = lambda _seconds, rows: told.append(rows)
    outcomes = [Outcome(sequence=SESSION, step=STEP), Outcome(sequence=SESSION, step=STEP)]
    failed = Outcome(sequence=SESSION, error=RuntimeError())
    with_threads(lambda: outcomes, tuner, reads=True)
    with_threads(lambda: outcomes, tuner, reads=False)
    with_threads(lambda: [*outcomes, failed], tuner, reads=False)
    with_threads(lambda: [failed], tuner, reads=False)
    assert told == [2 * TREE, 2 * TREE, 1]


@pytest.mark.usefixtures("_no_choice")
def test_an_engine_tells_the_tuner_of_every_step_but_the_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    learn = ThreadTuner.learn

    def remember(self: ThreadTuner, seconds: float, rows: int) -> None:
        told.append(rows)
        learn(self, seconds, rows)

    monkeypatch.setattr(ThreadTuner, "learn", remember)
    with Engine.from_pretrained(tree=TreeSettings(policy="chain", draft_tokens=3), context_tokens=64) as engine:
        result = engine.generate("def main(", max_new_tokens=12, temperature=0)
    assert told == [1 + step.num_drafted for step in result.steps[1:]]
    with Engine.from_pretrained(tree=TreeSettings(policy="none"), context_tokens=64, threads=1) as engine:
        engine.generate("def main(", max_new_tokens=4, temperature=0)
    assert len(told) == len(result.steps) - 1
