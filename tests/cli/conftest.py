"""Running the command line in this process."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest

from edgespec.cli import run


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    code: int
    out: str
    err: str


class RunCli(Protocol):
    """Runs `edgespec generate`, or another command, in a folder that holds `files`."""

    def __call__(
        self, arguments: list[str], *, files: dict[str, str] | None = None, stdin: str = "", command: str = "generate"
    ) -> Outcome: ...


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
