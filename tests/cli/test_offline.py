"""Nothing reaches for the network: the whole command runs with sockets that refuse to connect."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import RunCli

# Here even what is imported finds them so.
BLOCK_AND_RUN = """
import socket, sys
def refuse(*arguments, **options):
    raise AssertionError(f"a socket was used: {arguments}")
socket.socket.connect = socket.socket.connect_ex = socket.create_connection = socket.getaddrinfo = refuse
from edgespec.cli import main
main()
"""


@pytest.fixture
def _no_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **_options: object) -> None:
        raise AssertionError(f"a socket was used: {arguments}")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    for name in ("create_connection", "getaddrinfo"):
        monkeypatch.setattr(socket, name, refuse)


@pytest.mark.usefixtures("_no_sockets")
@pytest.mark.parametrize("quant", ["none", "nf4"])
def test_generate_works_with_sockets_blocked(
    quant: str, pair_folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_cli: RunCli
) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "cache"))
    target, draft = map(str, pair_folders)
    options = ["p.jsonl", "-m", target, "-md", draft, "-n", "6", "--temp", "0.8", "--seed", "1"]
    options += ["-ngl", "0", "-o", "out.jsonl", "--quant", quant]
    outcome = run_cli(options, files={"p.jsonl": '{"prompt": "def main("}\n{"prompt": "import os"}\n'}).ended()
    rows = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert [row["finish_reason"] for row in rows] == ["length", "length"]
    assert outcome.out == ""


def test_the_built_in_pair_streams_a_text_with_sockets_blocked(tmp_path: Path) -> None:
    prompt = tmp_path / "p.txt"
    prompt.write_text("def main(")
    outcome = subprocess.run(
        [sys.executable, "-c", BLOCK_AND_RUN, "generate", str(prompt), "-n", "6", "--temp", "0"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout.strip()
    assert "tok/pass" in outcome.stderr


@pytest.mark.usefixtures("_no_sockets")
def test_a_folder_that_looks_like_a_repository_is_not_looked_up(run_cli: RunCli) -> None:
    outcome = run_cli(["p.txt", "-m", "Qwen/Qwen3-8B"], files={"p.txt": "def main("}).ended(4)
    assert "Qwen/Qwen3-8B" in outcome.err
    assert "a socket was used" not in outcome.err
