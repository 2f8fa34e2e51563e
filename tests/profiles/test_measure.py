"""Facts and timings of this machine, and the order in which tasks are timed."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from profiles.measure import (
    Repeats,
    Task,
    drop_page_cache,
    machine_facts,
    read_sequentially,
    time_interleaved,
)


def test_facts_name_the_machine_and_its_software() -> None:
    facts = machine_facts()
    assert facts.memory_bytes > 1 << 28
    assert facts.num_cores >= 1
    assert facts.versions["torch"] == torch.__version__
    assert facts.processor


def test_a_card_is_asked_about_by_its_own_name_whatever_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = {1: SimpleNamespace(name="RTX 3060", total_memory=12 << 30, uuid="b"), 0: None}
    asked: list[list[str]] = []

    def run(command: list[str], **_options: Any) -> SimpleNamespace:
        asked.append(command)
        return SimpleNamespace(stdout="580.1, 4, 8\n")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: cards[device.index])
    monkeypatch.setattr(subprocess, "run", run)
    facts = machine_facts(torch.device("cuda", 1))
    assert (facts.accelerator, facts.accelerator_bytes) == ("RTX 3060", 12 << 30)
    assert (facts.driver, facts.link) == ("580.1", "PCIe 4.0 x8")
    assert "--id=GPU-b" in asked[0]
    assert machine_facts(torch.device("cpu")).accelerator is None
    assert len(asked) == 1


def test_sequential_read_counts_every_byte(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"x" * (20 << 20))
    drop_page_cache([path])
    assert 1e6 < read_sequentially([path, path]).bytes_per_s < 1e12


class Workshop:
    """Tasks that take the seconds they are told to, on a clock that only they move."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.done: list[str] = []

    def clock(self) -> float:
        return self.now_s

    def works(self, name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            self.now_s += seconds
            self.done.append(name)

        return run

    def tasks(self, **seconds: float) -> dict[str, Task]:
        return {name: Task(run=self.works(name, cost)) for name, cost in seconds.items()}

    @property
    def rounds(self) -> list[str]:
        return [first + second for first, second in zip(self.done[::2], self.done[1::2], strict=True)]


@pytest.fixture
def shop() -> Workshop:
    return Workshop()


def test_rounds_alternate_their_direction_and_the_first_is_not_counted(shop: Workshop) -> None:
    found = time_interleaved(shop.tasks(a=1, b=2), budget_s=0, min_rounds=3, clock=shop.clock)
    assert shop.rounds == ["ab", "ba", "ab", "ba"]
    assert found == {"a": Repeats((1, 1, 1)), "b": Repeats((2, 2, 2))}


def test_a_first_run_that_takes_longer_leaves_no_trace(shop: Workshop) -> None:
    costs = iter([50.0, 1.0, 2.0, 3.0])

    def run() -> None:
        shop.now_s += next(costs)

    found = time_interleaved({0: Task(run=run)}, budget_s=0, min_rounds=3, clock=shop.clock)
    assert found[0].seconds == (1, 2, 3)


def test_without_a_warm_up_every_round_counts(shop: Workshop) -> None:
    tasks = shop.tasks(a=1, b=2)
    found = time_interleaved(tasks, budget_s=0, min_rounds=2, warms_up=False, clock=shop.clock)
    assert shop.rounds == ["ab", "ba"]
    assert len(found["a"].seconds) == 2


@pytest.mark.parametrize(
    ("budget_s", "rounds"),
    [(0.0, 3), (20.0, 5), (29.0, 8), (31.0, 9), (1e9, 12)],
    ids=["least", "20 s", "29 s", "31 s", "most"],
)
def test_rounds_end_before_the_budget_does(budget_s: float, rounds: int, shop: Workshop) -> None:
    found = time_interleaved(shop.tasks(a=1, b=2), budget_s=budget_s, min_rounds=3, max_rounds=12, clock=shop.clock)
    assert len(found["a"].seconds) == rounds
    assert rounds == 3 or shop.now_s - 100 <= budget_s


def test_preparation_is_done_before_each_run_and_not_timed(shop: Workshop) -> None:
    tasks = {"a": Task(run=shop.works("r", 1), prepare=shop.works("p", 10))}
    found = time_interleaved(tasks, budget_s=0, min_rounds=2, clock=shop.clock)
    assert shop.rounds == ["pr"] * 3
    assert found["a"].seconds == (1, 1)


def test_preparation_counts_towards_the_budget(shop: Workshop) -> None:
    tasks = {"a": Task(run=shop.works("r", 1), prepare=shop.works("p", 10))}
    assert len(time_interleaved(tasks, budget_s=60, min_rounds=1, clock=shop.clock)["a"].seconds) == 4


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_what_a_task_raises_comes_through_at_once(error: type[BaseException], shop: Workshop) -> None:
    def fail() -> None:
        raise error

    tasks = {**shop.tasks(a=1), "b": Task(run=fail), **shop.tasks(c=1)}
    with pytest.raises(error):
        time_interleaved(tasks, budget_s=9, clock=shop.clock)
    assert shop.done == ["a"]


@pytest.mark.parametrize("budget_s", [0.0, 7.0, 30.0, 1e9])
def test_progress_grows_to_the_end(budget_s: float, shop: Workshop) -> None:
    shares: list[float] = []
    time_interleaved(shop.tasks(a=1, b=2), budget_s=budget_s, max_rounds=6, clock=shop.clock, progress=shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1.0, abs=0.15)
    assert 0 <= shares[0] <= shares[-1] <= 1


def test_the_median_and_the_spread_leave_outliers_aside() -> None:
    repeats = Repeats((1.0, 1.1, 0.9, 1.2, 0.8, 100.0, 1.0))
    assert repeats.median_s == 1.0
    assert repeats.spread_s == pytest.approx(0.3)
    assert Repeats((1.0, 4.0, 2.0)).spread_s == 3.0
    assert (Repeats((5.0,)).median_s, Repeats((5.0,)).spread_s) == (5.0, 0.0)


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_the_spread_is_never_negative_nor_more_than_there_is(seconds: list[float]) -> None:
    repeats = Repeats(tuple(seconds))
    assert 0 <= repeats.spread_s <= (max(seconds) - min(seconds)) * (1 + 1e-9)
    assert min(seconds) <= repeats.median_s <= max(seconds)
