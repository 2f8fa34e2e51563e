"""--prompt-cache of `generate` and `chat`: the same answers, and only what is new is read."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Outcome, RunCli

SYSTEM = "def read(path):\n    with open(path, encoding='utf-8') as file:\n        return file.read()\n"
ROWS = [{"id": str(number), "prompt": f"{SYSTEM}{text}"} for number, text in enumerate(("def a(", "import os", "x = "))]
OPTIONS = ["-n", "8", "--seed", "3", "--temp", "0.7", "--tree-size", "8"]


def generate(run_cli: RunCli, *options: str, rows: list[dict[str, str]] = ROWS) -> tuple[list[str], Outcome]:
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    outcome = run_cli(["rows.jsonl", *OPTIONS, "--ordered", *options], files={"rows.jsonl": lines}).ended()
    return [json.loads(line)["text"] for line in outcome.out.splitlines()], outcome


def test_later_runs_begin_on_what_an_earlier_one_read(run_cli: RunCli, tmp_path: Path) -> None:
    path = tmp_path / "system.safetensors"
    plain, _ = generate(run_cli)
    first, outcome = generate(run_cli, "--prompt-cache", str(path))
    assert "has 0 of the " in outcome.err
    second, outcome = generate(run_cli, "--prompt-cache", str(path))
    words = next(line for line in outcome.err.splitlines() if line.startswith("prompt cache")).split()
    num_known, num_wanted = int(words[words.index("has") + 1]), int(words[words.index("tokens") - 1])
    assert num_known == num_wanted > 16
    assert plain == first == second
    listed = json.loads(run_cli(["list", "--json"], command="cache").out)["kept"]
    prompts = [(entry["path"], entry["model"]) for entry in listed if entry["kind"] == "prompts"]
    assert prompts == [(str(path), "target")]
    if sys.platform != "win32":
        assert path.stat().st_mode & 0o777 == 0o600  # it holds what prompts say


def test_a_home_that_cannot_be_written_ends_no_run(
    run_cli: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file itself is written and used; nobody knows of it afterwards."""
    (tmp_path / "file").write_text("in the place of a folder")
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "file"))
    path = tmp_path / "system.safetensors"
    for num_known in ("0", "[1-9]"):
        _, outcome = generate(run_cli, "--prompt-cache", str(path))
        assert re.search(rf"has {num_known}\d* of the ", outcome.err)
    assert json.loads(run_cli(["list", "--json"], command="cache").out)["kept"] == []


def test_a_file_of_other_settings_is_one_error_before_anything_is_loaded(run_cli: RunCli, tmp_path: Path) -> None:
    path = tmp_path / "system.safetensors"
    generate(run_cli, "--prompt-cache", str(path))
    for options, message in (
        (["--dtype", "bfloat16"], "was made with --dtype float32, and this is --dtype bfloat16"),
        (["--prompt-cache", str(tmp_path / "nowhere" / "x")], "lies in a folder that is not there"),
    ):
        outcome = run_cli(["-p", "x", "--prompt-cache", str(path), *OPTIONS, *options]).ended(2)
        assert message in outcome.err
        assert "layers resident" not in outcome.err
        assert outcome.err.count("Error:") == 1


def test_a_chat_begins_on_its_system_message(run_cli: RunCli, tmp_path: Path) -> None:
    chat: list[Any] = ["--system", SYSTEM, "--prompt-cache", str(tmp_path / "chat.safetensors"), *OPTIONS]
    answers = []
    for number, message in enumerate(("def a(", "def a(", "import os")):
        outcome = run_cli(["-p", message, "-st", *chat], command="chat").ended()
        assert ("has 0 of the" in outcome.err) == (number == 0)
        answers.append(outcome.out)
    assert answers[0] == answers[1]
    plain = run_cli(["-p", "import os", "-st", "--system", SYSTEM, *OPTIONS], command="chat")
    assert plain.out == answers[2] != answers[0]
