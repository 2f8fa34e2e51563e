"""A full device and a reader that has gone: one error or none, a status that tells it, and nothing at the end."""

import io
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from edgespec.cli import standard_streams
from edgespec.pair.pair import DEMO_FOLDER
from tests.cli.conftest import RunCli

FULL = Path("/dev/full")
ERROR = (
    "Error: cannot write results to stdout (No space left on device).\nTry: Free some space, or send them elsewhere.\n"
)
GENERATE = ["generate", "-p", "def main(", "-n", "2"]

pytestmark = pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")


@pytest.mark.parametrize(
    ("command", "stdin"),
    [
        (GENERATE, ""),
        ([*GENERATE, "--format", "jsonl"], ""),
        (["estimate"], ""),
        (["config", "show"], ""),
        (["doctor"], ""),
        (["models", str(DEMO_FOLDER)], ""),
        (["chat", "-n", "2"], "def main("),
        (["profile", "--list"], ""),
        (["--help"], ""),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_full_device_is_one_error_whatever_command_writes(
    command: list[str], stdin: str, run_cli: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    with FULL.open("wb", buffering=0) as device:
        stream = io.TextIOWrapper(
            io.BufferedWriter(standard_streams._ResultStream(device.fileno(), "wb", closefd=False))
        )
        monkeypatch.setattr(sys, "stdout", stream)
        found = run_cli(command[1:], stdin=stdin, command=command[0])
        standard_streams.forget_rest()
        stream.close()  # which writes what it still holds
    assert found.code == 1
    assert found.err.endswith(ERROR)
    assert found.err.count("Error: ") == 1


def program(
    *arguments: str, python: Sequence[str] = (sys.executable,), **streams: int | None
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*python, "-m", "edgespec", *arguments], timeout=120, check=False, **streams)


def test_the_interpreter_adds_nothing_at_its_end() -> None:
    with FULL.open("wb") as device:
        found = program("config", "show", "--origin", stdout=device, stderr=subprocess.PIPE)
    assert (found.returncode, found.stderr.decode()) == (1, ERROR)


@pytest.mark.parametrize("command", [["config", "show", "--origin"], [*GENERATE, "-q"]], ids=" ".join)
def test_where_nobody_reads_any_more_a_command_ends_without_a_word(command: list[str], warm: list[str]) -> None:
    """`edgespec generate ... | head -1`"""
    read, write = os.pipe()
    os.close(read)
    try:
        found = program(*command, python=warm, stdout=write, stderr=subprocess.PIPE)
    finally:
        os.close(write)
    assert (found.returncode, found.stderr) == (1, b"")


def test_messages_that_nobody_can_read_end_no_run(warm: list[str]) -> None:
    with FULL.open("wb") as device:
        found = program(*GENERATE, python=warm, stdout=subprocess.PIPE, stderr=device)
    assert found.returncode == 0
    assert found.stdout


def test_a_stdout_that_is_closed_is_one_that_cannot_be_written() -> None:
    """And no file of ours takes its number, which libraries write to."""
    line = '"$0" -m edgespec config show >&-'
    found = subprocess.run(["sh", "-c", line, sys.executable], stderr=subprocess.PIPE, timeout=120, check=False)
    assert found.returncode == 1
    assert found.stderr.startswith(b"Error: cannot write results to stdout (Bad file descriptor).")
