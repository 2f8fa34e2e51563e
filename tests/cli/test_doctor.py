"""`edgespec doctor`: every check has a status and a sentence, and what is broken decides on the exit code."""

import errno
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from edgespec.doctor import checks, disk_speed, locked_memory
from edgespec.doctor import machine as machine_checks
from profiles import measure
from profiles.schema import MachineFacts
from tests.cli.conftest import RunCli
from tests.support.simulated_device import SimulatedDevice

GIB = 1 << 30
FACTS = MachineFacts(
    system="Linux",
    processor="A processor",
    num_cores=8,
    memory_bytes=GIB,
    accelerator="A card",
    accelerator_bytes=24 * GIB,
    driver="580.1",
    link="PCIe 4.0 x16",
    python="3.11",
    versions={},
)


@pytest.fixture(autouse=True)
def _small_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_speed, "MAX_WRITTEN_BYTES", disk_speed.CHUNK_BYTES)


def test_a_machine_that_is_fit_gets_exit_code_0_and_a_line_a_check(run_cli: RunCli) -> None:
    started = time.perf_counter()
    outcome = run_cli([], command="doctor")
    assert time.perf_counter() - started < 5
    lines = outcome.out.splitlines()
    assert outcome.code == 0
    assert all(line.startswith(("ok    ", "warn  ")) for line in lines)
    names = [line[6:].partition(":")[0] for line in lines]
    assert names == [
        "versions", "memory", "threads", "device", "kernels", "pinned memory", "profiles", "cache", "profiles folder",
        "sessions", "history", "configuration", "Hugging Face cache", "GGUF files", "offline", "built-in pair", "disk",
    ]  # fmt: skip
    assert not list(Path(os.environ["EDGESPEC_HOME"]).parent.glob("edgespec-*"))


def test_json_holds_the_same_with_numbers(run_cli: RunCli, pair_folders: tuple[Path, Path]) -> None:
    found = json.loads(run_cli([str(pair_folders[0]), "--json"], command="doctor").out)
    by_name: dict[str, Any] = {check["name"]: check for check in found["checks"]}
    assert found["ok"] is True
    assert torch.__version__.startswith(by_name["versions"]["facts"]["torch"])
    assert by_name["memory"]["facts"]["total_bytes"] > GIB
    disk = by_name["disk"]["facts"]
    assert disk["path"] == str(pair_folders[0])
    assert disk["bytes"] == sum(path.stat().st_size for path in pair_folders[0].glob("*.safetensors"))


def test_what_is_needed_and_broken_is_a_failure(run_cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Path(os.environ["EDGESPEC_HOME"])
    home.mkdir()
    (home / "config.toml").write_text("[defaults]\nctx_sise = 5\n")
    outcome = run_cli([], command="doctor").ended(1)
    assert "fail  configuration:" in outcome.out
    assert "Did you mean 'ctx_size'?" in outcome.out
    (home / "config.toml").unlink()
    assert run_cli(["nowhere/at-all"], command="doctor").code == 1
    monkeypatch.setattr(checks, "_requirements", lambda: {"torch": "999", "no-such-package": "1"})
    assert "fail  versions: missing packages: no-such-package" in run_cli([], command="doctor").ended(1).out


def test_what_only_makes_it_worse_is_a_warning(run_cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_requirements", lambda: {"torch": "999"})
    monkeypatch.setattr(checks.psutil, "virtual_memory", lambda: SimpleNamespace(available=GIB, total=2 * GIB))
    folder = Path(os.environ["EDGESPEC_HOME"]) / "profiles"
    folder.mkdir(parents=True)
    (folder / "old.toml").write_text("schema = 'edgespec.profile/0'")
    monkeypatch.setattr("edgespec.cli.doctor.SLOW_BYTES_PER_S", 1e15)
    outcome = run_cli([], command="doctor").ended()
    for line in ("versions: torch", "memory: 1.0 of 2.0 GiB", "profiles: 0 of this machine, 0 of others, 1 unreadable"):
        assert f"warn  {line}" in outcome.out
    assert "slow; layers" in outcome.out


def test_a_card_is_described_and_its_pinned_memory_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_checks, "machine_facts", lambda: FACTS)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (20 * GIB, 24 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 9))

    device = SimulatedDevice(is_eager=True)
    monkeypatch.setattr(machine_checks, "CudaDevice", lambda _device: device)
    monkeypatch.setattr(locked_memory, "STEP_BYTES", 1 << 20)
    monkeypatch.setattr(locked_memory, "MOST_BYTES", 4 << 20)
    card, _, pinned, _ = machine_checks.check_machine()
    assert card.status == "ok"
    for part in ("A card", "8.9", "20.0 of 24.0 GiB free", "driver 580.1", "PCIe 4.0 x16", "A processor"):
        assert part in card.text
    assert (pinned.status, pinned.facts["num_bytes"], pinned.facts["refusal"]) == ("ok", 4 << 20, None)
    assert "a pass over 20 GiB of layers takes" in pinned.text
    assert not device.pinned


@pytest.mark.parametrize(("allowed", "num_steps"), [(0, 0), (1.5, 1), (3, 3)])
def test_the_wall_of_locked_memory_is_found_and_what_it_costs(
    allowed: float, num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """WSL locks as little as a GiB, of which a single small step says nothing."""
    device = SimulatedDevice(is_eager=True, max_locked_bytes=int(allowed * (1 << 20)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(machine_checks, "CudaDevice", lambda _device: device)
    monkeypatch.setattr(locked_memory, "STEP_BYTES", 1 << 20)
    monkeypatch.setattr(locked_memory, "MOST_BYTES", 4 << 20)
    pinned = machine_checks._pinned()
    assert (pinned.status, pinned.facts["num_bytes"]) == ("warn", num_steps << 20)
    assert "and no more (the limit on locked memory is reached)" in pinned.text
    assert ("through staging buffers" in pinned.text.partition(";")[2]) == (num_steps > 0)
    assert not device.pinned


def test_locking_leaves_memory_that_is_not_free_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locked_memory, "free_host_bytes", lambda: locked_memory.LEFT_BYTES)
    assert locked_memory.try_locking(SimulatedDevice()) == locked_memory.LockedMemory(num_bytes=0)


@pytest.mark.parametrize(("host_rate", "staged_s"), [(5, "4.3"), (50, "0.9")])
def test_staging_costs_what_copying_on_the_host_takes(host_rate: int, staged_s: str) -> None:
    found = locked_memory.LockedMemory(num_bytes=GIB, link_bytes_per_s=24e9, host_bytes_per_s=host_rate * 1e9)
    assert f"takes 0.9 s from locked memory, and {staged_s} s through staging buffers" in found.cost


def test_a_torch_without_cuda_beside_a_driver_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(machine_checks.shutil, "which", lambda _name: "/usr/bin/nvidia-smi")
    device, *_ = machine_checks.check_machine()
    assert (device.status, "built without CUDA" in device.text) == ("warn", True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    device, *_ = machine_checks.check_machine()
    assert (device.status, "finds no device" in device.text) == ("warn", True)


def test_a_torch_that_cannot_be_used_is_a_failure_among_other_checks(
    run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "edgespec.doctor.machine", None)
    outcome = run_cli([], command="doctor").ended(1)
    assert "fail  device: torch cannot be used" in outcome.out
    assert "ok    built-in pair" in outcome.out


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_probe_locks_memory_for_real() -> None:
    device, _, pinned, _ = machine_checks.check_machine()
    assert torch.cuda.get_device_name(0) in device.text
    assert (pinned.status, pinned.facts["locked"]) == ("ok", True)


def test_the_disks_speed_is_bounded_in_time_and_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "large").write_bytes(bytes(1 << 20))
    monkeypatch.setattr(measure, "READ_BYTES", 1 << 10)
    monkeypatch.setattr(disk_speed, "MAX_BYTES", 10 << 10)
    assert disk_speed.read_speed([tmp_path / "large"] * 2).num_bytes == 10 << 10
    monkeypatch.setattr(disk_speed, "MAX_S", 0.0)
    assert disk_speed.read_speed([tmp_path / "large"] * 2).num_bytes == 0


def test_a_folders_size_counts_files_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "x").write_bytes(bytes(100))
    (tmp_path / "link").symlink_to("blobs/x")
    assert checks.size_of(tmp_path) == (100, True)
    assert checks.size_of(tmp_path / "nowhere") == (0, True)
    monkeypatch.setattr(checks, "MAX_COUNTED_FILES", 1)
    assert checks.size_of(tmp_path)[1] is False
    assert checks.describe_size(3 * GIB // 2, is_whole=False) == "at least 1.5 GiB"


@pytest.mark.parametrize("kind", ["below a file", "takes no files", "may not be entered"])
def test_a_home_that_cannot_be_written_is_a_warning_of_each_place(
    kind: str, run_cli: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    reason = {"below a file": "Not a directory", "takes no files": "Read-only", "may not be entered": "Permission"}[
        kind
    ]
    if kind == "below a file":
        home.write_text("")
    elif kind == "takes no files":

        def refuse(dir: Path) -> None:  # noqa: A002
            raise OSError(errno.EROFS, "Read-only file system", str(dir))

        monkeypatch.setattr(checks.tempfile, "TemporaryFile", refuse)
    else:
        right = Path.exists

        def closed(self: Path, **named: Any) -> bool:
            if home in self.parents:
                raise PermissionError(errno.EACCES, "Permission denied", str(self))
            return right(self, **named)

        monkeypatch.setattr(Path, "exists", closed)
    monkeypatch.setenv("EDGESPEC_HOME", str(home))
    outcome = run_cli([], command="doctor").ended()
    lines = {line[6:].partition(":")[0]: line for line in outcome.out.splitlines()}
    for name in ("cache", "profiles folder", "sessions", "history"):
        assert lines[name].startswith("warn ")
        assert f"it cannot be written ({reason}" in lines[name]
        assert "EDGESPEC_HOME chooses another place" in lines[name]


def test_trying_to_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    (tmp_path / "history").write_text("typed\n")
    assert {check.status for check in checks.check_places()} == {"ok"}
    assert [path.name for path in tmp_path.iterdir()] == ["history"]
    assert (tmp_path / "history").read_text() == "typed\n"


@pytest.mark.parametrize(
    ("has_torchs", "has_bitsandbytes", "done"),
    [
        (False, False, "unpacked"), (True, False, "multiplied by torch's (int4), "),
        (True, True, "multiplied by torch's (int4) and bitsandbytes' (nf4), "),
    ],
)  # fmt: skip
def test_it_says_which_kernels_multiply_packed_weights_and_why_no_others(
    has_torchs: bool, has_bitsandbytes: bool, done: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if machine_checks.why_unavailable() is None:
        _, found, *_ = machine_checks.check_machine()
        assert (found.status, found.facts["compiled"]) == ("ok", True)
        assert machine_checks.processor_name() in found.text
    monkeypatch.setattr(machine_checks, "why_unavailable", lambda: "llvmlite is not installed")
    monkeypatch.setattr(machine_checks, "kernel_order", lambda: "halves64" if has_torchs else None)
    monkeypatch.setattr(machine_checks, "kernel_is_there", lambda: has_bitsandbytes)
    _, found, *_ = machine_checks.check_machine()
    assert found.facts == {"compiled": False, "reason": "llvmlite is not installed"}
    assert f"(llvmlite is not installed): weights of four bits are {done}" in found.text
