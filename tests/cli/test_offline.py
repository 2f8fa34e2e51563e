"""Nothing reaches for the network: the whole command runs with sockets that refuse to connect."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BLOCK_AND_RUN = """
import socket, sys
def refuse(*arguments, **options):
    raise AssertionError(f"a socket was used: {arguments}")
socket.socket.connect = socket.socket.connect_ex = socket.create_connection = socket.getaddrinfo = refuse
from edgespec.cli import main
main()
"""


@pytest.mark.parametrize("quant", ["none", "nf4"])
def test_generate_works_with_sockets_blocked(
    quant: str, pair_folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "cache"))
    prompts, out = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": "def main("}\n{"prompt": "import os"}\n')
    target, draft = map(str, pair_folders)
    options = [str(prompts), "-m", target, "-md", draft, "-n", "6", "--temp", "0.8", "--seed", "1"]
    options += ["-ngl", "0", "-o", str(out), "--quant", quant]
    outcome = subprocess.run(
        [sys.executable, "-c", BLOCK_AND_RUN, "generate", *options], capture_output=True, text=True, check=False
    )
    assert outcome.returncode == 0, outcome.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["finish_reason"] for row in rows] == ["length", "length"]
    assert outcome.stdout == ""


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


def test_a_folder_that_looks_like_a_repository_is_not_looked_up(tmp_path: Path) -> None:
    prompts = tmp_path / "p.txt"
    prompts.write_text("def main(")
    outcome = subprocess.run(
        [sys.executable, "-c", BLOCK_AND_RUN, "generate", str(prompts), "-m", "Qwen/Qwen3-8B"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert outcome.returncode == 4
    assert "Qwen/Qwen3-8B" in outcome.stderr
    assert "a socket was used" not in outcome.stderr
