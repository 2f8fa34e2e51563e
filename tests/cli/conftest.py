"""Running the command line in this process."""

import io
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import pytest

from edgespec.cli import run
from edgespec.doctor import disk_speed, machine_speed
from offload.pages import MappedFile


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    code: int
    out: str
    err: str

    def ended(self, code: int = 0) -> Self:
        """The same, whose program must have ended with this code."""
        assert self.code == code, self.err
        return self


def jsonl(rows: Iterable[Any]) -> dict[str, str]:
    """A file of prompts, for `run_cli`."""
    return {"p.jsonl": "".join(json.dumps(row) + "\n" for row in rows)}


def records(outcome: Outcome, code: int = 0) -> list[dict[str, Any]]:
    """The records that a run has written to stdout."""
    return [json.loads(line) for line in outcome.ended(code).out.splitlines()]


def written(path: str | Path = "out.jsonl") -> list[dict[str, Any]]:
    """The records of an output file."""
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


class RunCli(Protocol):
    """Runs `edgespec generate`, or another command, in a folder that holds `files`."""

    def __call__(
        self, arguments: list[str], *, files: dict[str, str] | None = None, stdin: str = "", command: str = "generate"
    ) -> Outcome: ...


@pytest.fixture(autouse=True)
def _measures_the_machine_shortly(monkeypatch: pytest.MonkeyPatch) -> None:
    """No command's test depends on how fast this machine is."""
    monkeypatch.setattr(machine_speed, "MATRIX", {"cpu": (64, 64)})
    monkeypatch.setattr(machine_speed, "PRODUCT", {"cpu": 64})
    monkeypatch.setattr(machine_speed, "PACKED", (64, 64))
    monkeypatch.setattr(machine_speed, "UNCACHED_BYTES", 1)
    monkeypatch.setattr(machine_speed, "BUDGET_S", 0.001)
    monkeypatch.setattr(disk_speed, "MAX_WRITTEN_BYTES", disk_speed.CHUNK_BYTES)


@pytest.fixture(autouse=True)
def _has_a_terminal_that_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a test has a terminal, it is no dumb one."""
    monkeypatch.setenv("TERM", "xterm")


@pytest.fixture
def no_weights_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail when a weight file is opened for its weights."""

    def refuse(self: MappedFile, path: Path) -> None:
        raise AssertionError(f"{path} was opened")

    monkeypatch.setattr(MappedFile, "__init__", refuse)


@pytest.fixture
def run_cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunCli:
    def call(
        arguments: list[str], *, files: dict[str, str] | None = None, stdin: str = "", command: str = "generate"
    ) -> Outcome:
        folder = tmp_path / "cwd"
        folder.mkdir(exist_ok=True)
        for name, content in (files or {}).items():
            (folder / name).write_text(content, encoding="utf-8")
        monkeypatch.chdir(folder)
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        capsys.readouterr()
        code = run([command, *arguments])
        captured = capsys.readouterr()
        return Outcome(code=code, out=captured.out, err=captured.err)

    return call
