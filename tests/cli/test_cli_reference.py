"""docs/cli.md is what the commands say of themselves, and docs/generate.md has the keys of rows that the code has."""

import re

import click
import pytest

from edgespec.cli import COMMANDS, cli
from scripts.make import row_keys
from scripts.make.cli_reference import PATH, reference


def test_the_reference_is_up_to_date() -> None:
    assert PATH.read_text(encoding="utf-8") == reference(), "run: python -m scripts.make.cli_reference"


def test_it_is_the_same_in_every_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = reference()
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("EDGESPEC_CTX_SIZE", "77")
    assert reference() == whole
    assert max(map(len, whole.splitlines())) <= 120


def test_every_command_is_in_it() -> None:
    for name in [*COMMANDS, "config show"]:
        assert f"# edgespec {name}\n```\nUsage: edgespec {name} " in reference()


def test_what_several_commands_take_is_printed_once() -> None:
    lines = reference().splitlines()
    for option in ("--max-cpu-mem SIZE", "--policy TEXT", "-t, --threads auto|N"):
        assert sum(line.strip().startswith(option) for line in lines) == 1


@pytest.mark.parametrize("name", ["bench", "chat", "doctor", "generate", "profile", "train head"])
def test_a_reader_finds_every_option_of_a_command(name: str) -> None:
    """Each stands in the command's own block, or in a group that the line below the block takes it from."""
    groups = dict(re.findall(r"^### ([A-Z][^\n]*)\n```\n(.*?)\n```", reference(), re.MULTILINE | re.DOTALL))
    section = re.split(rf"(?m)^#+ edgespec {name}\n(?=```\nUsage)", reference())[1].partition("\n#")[0]
    block, _, shared = section.rpartition("```")
    own = set(re.findall(r"(?m)^ +(?:-\w+, )*(--[a-z-]+)", block))  # and flags that a line of prose begins with
    taken = set()
    for part in " ".join(shared.split()).removeprefix("Shared: ").rstrip(".").split("; "):
        match = re.fullmatch(r"(of )?\*(.*)\*(?: but)?(.*)", part)
        if match is not None:
            named = set(re.findall(r"`(--[a-z-]+)`", match[3]))
            taken |= named if match[1] else {*re.findall(r"(?m)^(?:-\w+, )*(--[a-z-]+)", groups[match[2]])} - named
    command: click.Command = cli
    for word in name.split():
        assert isinstance(command, click.Group)
        command = command.get_command(click.Context(command), word) or command
    firsts = {next(spelled for spelled in option.opts if spelled.startswith("--"))
              for option in command.params if isinstance(option, click.Option)}  # fmt: skip
    assert taken <= firsts <= own | taken


def test_the_list_of_keys_is_up_to_date() -> None:
    page = row_keys.PATH.read_text(encoding="utf-8")
    assert page == row_keys.page_with_list(page), "run: python -m scripts.make.row_keys"
    assert "| `max_new_tokens` | `max_tokens`," in page
