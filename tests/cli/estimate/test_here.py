"""`edgespec estimate` without --hardware: the speed of the machine that runs it, measured once."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from edgespec.cli import run
from edgespec.doctor import machine_speed
from edgespec.doctor.disk_speed import DiskSpeed
from edgespec.doctor.machine_speed import MachineSpeed, measure_speed
from edgespec.tuning import threads
from edgespec.user_paths import machine_file
from offload.layouts import int4_orders

CPU = torch.device("cpu")


needs_kernel = pytest.mark.skipif(int4_orders.kernel_order() is None, reason="torch has no kernel here")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was measured, in order: by a machine that reads 10 GB/s and computes 0.1 TFLOP/s, with a disk of 1 GB/s."""
    parts: list[str] = []

    def speed(device: torch.device) -> MachineSpeed:
        parts.append("machine")
        return MachineSpeed(
            schema=machine_speed.SCHEMA, device_name=machine_speed.device_name(device),
            threads=torch.get_num_threads(), created="2026-01-02", memory_bytes_per_s=10e9, half_memory_bytes_per_s=5e9,
            half_flops_per_s=0.05e12, float32_flops_per_s=0.1e12, kernels={"int4": (2e9, 8e9)}, link_bytes_per_s=None,
            disks={},
        )  # fmt: skip

    def disk(files: list[Path]) -> tuple[str, DiskSpeed]:
        parts.append("files" if files else "scratch")
        return machine_speed.disk_of(files), DiskSpeed(bytes_per_s=1e9, num_bytes=1, is_cold=True)

    monkeypatch.setattr(machine_speed, "measure_speed", speed)
    monkeypatch.setattr(machine_speed, "measure_disk", disk)
    return parts


def estimate(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[dict[str, Any], str]:
    assert run(["estimate", *arguments, "--json"]) == 0
    captured = capsys.readouterr()
    return json.loads(captured.out), captured.err


def test_the_machine_is_measured_once_and_again_where_that_is_asked_for(
    capsys: pytest.CaptureFixture[str], measured: list[str]
) -> None:
    _, err = estimate(capsys)
    assert "measuring memory, arithmetic and disk of this machine, once" in err
    assert str(machine_file()) in err
    assert measured == ["machine", "files"]
    _, err = estimate(capsys)
    assert (err, len(measured)) == ("", 2), "kept"
    estimate(capsys, "--measure")
    assert len(measured) == 4


def test_what_a_busy_machine_measures_is_said_and_not_kept(
    capsys: pytest.CaptureFixture[str], measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as busy:
        busy.setattr(threads.OthersLoad, "__call__", lambda _load: 1.5)
        _, err = estimate(capsys)
    assert "not kept: other programs kept 1.5 processors busy" in " ".join(err.split())
    assert not machine_file().exists()
    monkeypatch.setattr(threads.OthersLoad, "__call__", lambda _load: None)
    _, err = estimate(capsys)
    assert "not kept" not in err
    assert machine_file().exists()
    assert measured == ["machine", "files"] * 2


@pytest.mark.parametrize(
    "change", [{"device_name": "another"}, {"threads": 99}, {"schema": "old"}, {"disks": {"/": -1}}]
)
def test_what_was_measured_of_another_machine_is_not_used(
    change: dict[str, Any], capsys: pytest.CaptureFixture[str], measured: list[str]
) -> None:
    estimate(capsys)
    kept = json.loads(machine_file().read_text(encoding="utf-8"))
    machine_file().write_text(json.dumps(kept | change), encoding="utf-8")
    estimate(capsys)
    assert len(measured) == 4
    machine_file().write_text("{", encoding="utf-8")
    estimate(capsys)
    assert len(measured) == 6, "nor is a damaged file"


def test_the_speed_is_that_of_the_measured_rates(capsys: pytest.CaptureFixture[str], measured: list[str]) -> None:
    """Without a tree, all resident: as long as its memory takes to read layers, keys and values."""
    facts, _ = estimate(capsys, "--policy", "none", "-c", "512")
    plain = facts["speed"]["plain"]
    layers = facts["device_bytes"]["8 resident layers"]
    # In the fast case the measured rate is reached, and a CPU calls the kernels besides.
    assert plain["compute_s"]["fast"] == pytest.approx(layers / 10e9 + 8 * 0.35e-3, rel=0.2)
    assert facts["device"] == "cpu"
    assert run(["estimate", "--max-cpu-mem", "310MiB", "--policy", "none"]) == 0
    out = capsys.readouterr().out
    assert "at 10 GB/s, 0.1 TFLOP/s in float32; measured 2026-01-02 (again: --measure)" in out
    assert "a disk of 0.7 GB/s" in out, "two thirds of what it was read at"


@needs_kernel
def test_packed_weights_are_multiplied_at_the_measured_rate(
    capsys: pytest.CaptureFixture[str], measured: list[str]
) -> None:
    """By one row as fast as the kernel reads, by the rows of a tree as fast as it computes each."""
    options = ("--quant", "int4", "--dtype", "bfloat16", "-c", "128", "--tree-size", "31")
    speed = estimate(capsys, *options)[0]["speed"]
    weights, calls_s = 8 * (2 * 256 * 256 + 2 * 128 * 256 + 3 * 768 * 256), 8 * 0.35e-3
    assert speed["plain"]["compute_s"]["fast"] - calls_s == pytest.approx(weights / 2e9, rel=0.1)
    assert speed["tree"]["compute_s"]["fast"] - calls_s == pytest.approx(32 * weights / 8e9, rel=0.1)
    [kernel] = speed["kernels"]
    assert (kernel["format"], kernel["is_measured"]) == ("int4", True)
    assert run(["estimate", *options]) == 0
    out = capsys.readouterr().out
    assert "int4 is multiplied as it is packed" in out
    assert ": 1.67 thousand million weights a second by one row, 6.67 by each of many (measured)" in out
    assert run(["estimate", *options, "--hardware", "cpu"]) == 0
    assert "by each of many (assumed: as memory is read and as float32 computes)" in capsys.readouterr().out


def test_a_pair_that_does_not_fit_is_refused_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], measured: list[str]
) -> None:
    assert run(["estimate", "--max-cpu-mem", "200MiB"]) == 5
    assert measured == []


def test_a_home_that_cannot_be_written_to_ends_nothing(capsys: pytest.CaptureFixture[str], measured: list[str]) -> None:
    Path(os.environ["EDGESPEC_HOME"]).write_text("no folder")
    facts, err = estimate(capsys)
    assert "not kept: " in err
    assert facts["speed"]["plain"]["tokens_per_s"]["likely"] > 0


def test_the_measurement_itself_is_of_a_real_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_speed, "BUDGET_S", 0.01)
    monkeypatch.setitem(machine_speed.MATRIX, "cpu", (1024, 1024))
    monkeypatch.setitem(machine_speed.PRODUCT, "cpu", 128)
    found = measure_speed(CPU)
    assert 1e7 < found.half_memory_bytes_per_s <= found.memory_bytes_per_s < 1e13
    assert 1e6 < found.half_flops_per_s < 1e15
    assert 1e6 < found.float32_flops_per_s < 1e15
    hardware = found.hardware(CPU)
    assert hardware.device == "cpu"
    assert hardware.kernels.keys() == found.kernels.keys()
    if int4_orders.kernel_order() is not None:
        one_row, each_row = found.kernels["int4"]
        assert 1e6 < one_row <= 2 * each_row < 1e13
