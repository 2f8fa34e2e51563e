"""The experiment that kills runs sees every fault that it is there to see."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from scripts.check.resume import Counts, judge, tear

EXPECTED = {"p0": ["a"], "p1": ["b", "c"]}


def line(name: str, *turns: str) -> str:
    return json.dumps({"id": name, "turns": turns}) + "\n"


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (line("p0", "a") + line("p1", "b", "c"), None),
        (line("p1", "b", "c"), "lost"),
        (line("p0", "a") * 2 + line("p1", "b", "c"), "twice"),
        (line("p0", "a") + line("p1", "b"), "different"),
        (line("p0", "a") + "{torn\n" + line("p1", "b", "c"), "torn_left"),
        (line("p0", "a") + line("p1", "b", "c") + "{torn", "torn_left"),
    ],
)
def test_each_fault_is_counted(content: str, fault: str | None, tmp_path: Path) -> None:
    (tmp_path / "out").write_text(content)
    counts = Counts()
    judge(tmp_path / "out", EXPECTED, counts)
    found = {name for name in ("lost", "twice", "torn_left", "different") if getattr(counts, name)}
    assert found == ({fault} if fault else set())
    assert counts.passed == (fault is None)


def test_tearing_cuts_the_last_record_and_no_other(tmp_path: Path) -> None:
    first, last = line("p0", "a"), line("p1", "b", "c")
    for seed in range(50):
        (tmp_path / "out").write_text(first + last)
        assert tear(tmp_path / "out", random.Random(seed))
        left = (tmp_path / "out").read_text()
        assert left.startswith(first)
        assert len(first) < len(left) < len(first + last) - 1
    assert not tear(tmp_path / "nothing", random.Random(0))
