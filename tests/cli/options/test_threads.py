"""`--threads` is taken as given, and a number that the machine does not have is one error before anything is loaded."""

import json
import os
from pathlib import Path

import pytest
import torch

from edgespec.cli import COMMANDS
from edgespec.machine import cpu
from edgespec.machine.cpu import Cpu
from tests.cli.conftest import RunCli

TEXT = ["-p", "def main(", "-n", "3", "--temp", "0"]


@pytest.mark.parametrize("threads", ["0", "-2", "4097"])
@pytest.mark.parametrize("command", ["bench", "chat", "generate", "profile"])
def test_a_number_that_the_machine_does_not_have_is_one_error(command: str, threads: str, run_cli: RunCli) -> None:
    named, way_out = run_cli([f"--threads={threads}"], command=command).ended(2).err.splitlines()
    assert named.startswith(f"Error: --threads {threads} is not between 1 and {os.cpu_count()}")
    assert way_out.startswith("Try: ")


def test_what_is_no_number_is_wrong_usage(run_cli: RunCli) -> None:
    outcome = run_cli([*TEXT, "-t", "many"])
    assert (outcome.code, "'many' is not auto or a number of threads" in outcome.err) == (2, True)


def test_the_configuration_and_the_environment_may_set_it(run_cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Path(os.environ["EDGESPEC_HOME"])
    home.mkdir()
    (home / "config.toml").write_text("[defaults]\nthreads = 0\n")
    outcome = run_cli(TEXT)
    assert (outcome.code, "config.toml' [defaults] threads = 0: " in outcome.err) == (2, True), outcome.err
    assert run_cli(["--json"], command="estimate").code == 0  # runs nothing, and has no such flag
    (home / "config.toml").write_text("[defaults]\nthreads = 1\n")
    assert run_cli(TEXT).code == 0
    monkeypatch.setenv("EDGESPEC_THREADS", "0")
    assert "--threads 0 is not between" in run_cli(TEXT).err


def test_records_hold_the_number_and_more_than_there_are_cores_is_a_remark(
    run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(cpu, "read_cpu", lambda: Cpu(machine=4, allowed=(0, 1), physical=1, quota=None))
    outcome = run_cli([*TEXT, "--format", "jsonl", "-t", "2"]).ended()
    assert json.loads(outcome.out)["threads"] == torch.get_num_threads() == 2
    assert "--threads 2: 1 have a core of their own here" in outcome.err
    assert "a core of their own" not in run_cli([*TEXT, "-t", "1"]).err


def test_verbose_and_doctor_say_what_auto_means_here(run_cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    held = Cpu(machine=4, allowed=(0, 1), physical=2, quota=1.5)
    monkeypatch.setattr(cpu, "read_cpu", lambda: held)
    monkeypatch.setattr("edgespec.doctor.checks.read_cpu", lambda: held)
    words = "threads: 1 (2 cores, the affinity allows 2 of 4 processors, the cgroup's quota is 1.5)"
    assert words in run_cli([*TEXT, "-v"]).err
    assert f"{words}; they wait as OMP_WAIT_POLICY=passive" in run_cli([], command="doctor").out
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    by_name = {check["name"]: check for check in json.loads(run_cli(["--json"], command="doctor").out)["checks"]}
    assert by_name["threads"]["text"].startswith("as OMP_NUM_THREADS=3 says")
    assert by_name["threads"]["facts"]["chosen_by"] == "OMP_NUM_THREADS"


def test_every_command_that_runs_models_has_it(run_cli: RunCli) -> None:
    for command in set(COMMANDS) - {"cache", "completion", "config", "doctor", "estimate", "models", "train"}:
        assert "-t, --threads auto|N" in run_cli(["--help"], command=command).out
