"""Files that a command writes are no others that it names: whatever they are called, and before anything is written."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import click
import pytest

from edgespec.cli import cli
from edgespec.cli.config.groups import all_commands
from edgespec.cli.options.files import READ, WRITTEN
from edgespec.user_paths import written_whole
from tests.cli.conftest import RunCli

PROMPTS = json.dumps({"id": "a", "prompt": "def main("}) + "\n"
MODELS = {"target", "folders", "tokenizer"}  # are folders, which are compared with what lies in them


def test_every_option_that_names_a_file_is_compared() -> None:
    commands = all_commands(click.Context(cli, info_name="edgespec"))
    named = {
        str(option.name)
        for command in commands.values()
        for option in command.params
        if isinstance(option.type, click.Path) or "FILE" in (option.metavar or "")
    }
    assert named - {"log_file", "config"} - MODELS <= {*WRITTEN, *READ}  # those two are known by themselves


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("-o F --prompt-cache F", "--output and --prompt-cache are one file: 'F'."),
        ("-o F --prompt-cache ../cwd/F", "--output and --prompt-cache"),
        ("-o results --overwrite --prompt-cache link", "--output and --prompt-cache are one file: 'results', 'link'."),
        ("-o results --overwrite --prompt-cache hard", "--output and --prompt-cache are one file: 'results', 'hard'."),
        ("-o new --prompt-cache link-to-new", "--output and --prompt-cache"),
        ("-o F --log-file F", "--output and --log-file"),
        ("--prompt-cache F --log-file F", "--prompt-cache and --log-file"),
        ("-o p.jsonl --overwrite", "PROMPTS and --output"),
        ("-o schema --overwrite --json-schema schema", "--json-schema and --output"),
        ("-o schema --overwrite --grammar schema", "--grammar and --output"),
        ("-o schema --overwrite --system-file schema", "--system-file and --output"),
        ("-o config.toml --overwrite", "the configuration and --output"),
        ("-o F --prompt-cache F.waiting", "the waiting records of --output"),
        ("-o model/config.json --overwrite -m model", "a file of the target and --output"),
        ("-o F --prompt-cache F --dry-run", "--output and --prompt-cache"),
        (f'-o F --prompt-cache F --json-schema {{"description":"{"x" * 5000}"}}', "--output and --prompt-cache"),
    ],
)
def test_two_names_of_one_file_are_refused_where_one_is_written(
    options: str, named: str, run_cli: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pair_folders: list[Path]
) -> None:
    folder = tmp_path / "cwd"
    folder.mkdir()
    (folder / "link").symlink_to("results")
    (folder / "link-to-new").symlink_to("new")
    (folder / "model").symlink_to(pair_folders[0])
    (folder / "results").write_text("kept")
    os.link(folder / "results", folder / "hard")
    monkeypatch.setenv("EDGESPEC_CONFIG", "config.toml")
    files = {"p.jsonl": PROMPTS, "schema": '{"type": "object"}', "config.toml": ""}
    before = (pair_folders[0] / "config.json").read_bytes()
    assert named in run_cli(["p.jsonl", *options.split()], files=files).ended(1).err
    assert {name: (folder / name).read_text() for name in files} == files
    assert (folder / "results").read_text() == "kept"
    assert (pair_folders[0] / "config.json").read_bytes() == before
    assert not (folder / "new").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="no devices in the file system")
def test_a_device_may_be_named_twice(run_cli: RunCli) -> None:
    options = ["-o", "/dev/null", "--log-file", "/dev/null", "-n", "2"]
    assert run_cli(["p.jsonl", *options], files={"p.jsonl": PROMPTS}).code == 0


@pytest.mark.parametrize(
    ("command", "options", "named"),
    [
        ("profile", "--plot F.svg --log-file F.svg", "--plot and --log-file"),
        ("profile", "--import pair.toml --overwrite --log-file pair.toml", "is no log"),
        ("train", "acceptance --prompts p.jsonl -o p.jsonl --overwrite", "--prompts and --output"),
        ("train", "classifier --prompts p.jsonl -o new --records new", "--output and --records"),
        ("train", "head --data p.jsonl -o p.jsonl --overwrite", "--data and --output"),
        ("chat", "-p x --system-file schema --prompt-cache schema", "--system-file and --prompt-cache"),
    ],
)
def test_every_command_that_writes_compares_them(command: str, options: str, named: str, run_cli: RunCli) -> None:
    files = {"p.jsonl": PROMPTS, "schema": "text", "pair.toml": "x = 1"}
    outcome = run_cli(options.split(), files=files, command=command)
    assert outcome.code in {1, 2}
    assert named in outcome.err
    assert {name: Path(name).read_text() for name in files} == files


def test_a_chat_is_not_saved_over_a_file_in_use(run_cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    from edgespec.cli.chat import actions, command
    from edgespec.cli.chat.state import Chat

    def single_turn(chat: Chat, _first: str) -> int:
        with written_whole(Path("cache")) as partial:
            partial.write_text("rows")
        actions.ACTIONS["save!"].run(chat, "cache")
        return 0

    monkeypatch.setattr(command, "use_prompt_cache", lambda *_: None)
    monkeypatch.setattr("edgespec.cli.chat.loop.single_turn", single_turn)
    outcome = run_cli(["-p", "x", "--prompt-cache", "cache"], command="chat").ended(1)
    assert "/save and --prompt-cache are one file: 'cache'." in outcome.err
    assert Path("cache").read_text() == "rows"
