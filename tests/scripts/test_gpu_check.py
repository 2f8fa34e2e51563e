"""The checks of a CUDA device, as far as a machine without one can try them: no part is lost by another's fault."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import gpu_check
from tests.pretend_cuda import pretend_cuda
from tests.profiles.examples import MACHINE

ROOT = Path(__file__).parents[2]


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_check, "machine_facts", lambda _device: MACHINE)
    monkeypatch.setattr("sys.argv", ["gpu_check.py", "--only", "greedy", "slow", "tests"])


def breaks(_rows: list[int]) -> tuple[bool, Any]:
    raise RuntimeError("CUDA error: an illegal memory access")


@pytest.mark.usefixtures("card")
def test_a_part_that_breaks_or_fails_takes_no_other_with_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = {"greedy": breaks, "slow": lambda _rows: (False, "differ"), "tests": lambda _rows: (True, "passed: 9")}
    monkeypatch.setattr(gpu_check, "PARTS", parts)
    assert gpu_check.main() == 1
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["failed"] == ["greedy", "slow"]
    assert "illegal memory access" in report["greedy"]
    assert report["tests"] == "passed: 9"


@pytest.mark.usefixtures("card")
def test_who_stops_it_keeps_what_was_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stopped(_rows: list[int]) -> tuple[bool, Any]:
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_check, "PARTS", {"greedy": lambda _rows: (True, 6), "slow": stopped, "tests": breaks})
    with pytest.raises(KeyboardInterrupt):
        gpu_check.main()
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["greedy"] == 6


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A card that computes as the host does; what is asked of its memory has no meaning here."""
    nothing = {name: lambda *_arguments: None for name in ("synchronize", "reset_peak_memory_stats", "_sleep")}
    zero = {name: lambda *_arguments: 0 for name in ("memory_reserved", "max_memory_reserved")}
    for name, stand_in in {**nothing, **zero}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_arguments: (8 << 30, 8 << 30))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"segment.all.allocated": 0})
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    with pretend_cuda():
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(gpu_check, "SHAPES", {"7B-like": (1024, 512, 3)})
        yield


@pytest.mark.usefixtures("pretended")
def test_streamed_passes_and_slow_ones_run_through() -> None:
    with gpu_check.written_shape("7B-like") as pair:
        row = gpu_check.check_streaming(pair, 3, "none", 1.0)
        assert row["equal"]
        assert row["pass_gib"] > 0
        assert gpu_check.check_slow(pair)


@pytest.mark.usefixtures("pretended")
def test_texts_run_through(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = gpu_check.read_prompts(str(gpu_check.DEMO_FOLDER / "prompts.jsonl"), lines=False)[:1]
    monkeypatch.setattr(gpu_check, "read_prompts", lambda *_arguments, **_named: rows)
    monkeypatch.setattr(gpu_check, "NEW_TOKENS", 3)
    assert gpu_check.greedy_part([])[0]
    assert gpu_check.check_together(num_texts=2)["equal_texts"] == 2


@pytest.mark.usefixtures("pretended")
def test_packed_weights_and_small_copies_run_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "PACKED_SHAPE", (64, 128))
    monkeypatch.setattr(gpu_check, "QUEUED_SHAPE", (16, 16))
    assert gpu_check.packed_part([])[0]
    assert gpu_check.small_part([])[1]["copy_ms"] > 0


def test_every_file_with_tests_of_a_device_is_run() -> None:
    marked = {
        str(path.relative_to(ROOT)).replace("\\", "/")
        for path in (ROOT / "tests").rglob("*.py")
        if "pytest.mark.gpu" in path.read_text(encoding="utf-8") and path != Path(__file__)
    }
    assert marked == {*gpu_check.GPU_TESTS}
