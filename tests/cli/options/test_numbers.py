"""Whole numbers on the command line: 16.0 is 16, and -1 is off where that has a meaning."""

from pathlib import Path
from typing import Any

import click
import pytest

from edgespec.cli import cli
from edgespec.cli.config.groups import all_commands


def parsed(command: str, *arguments: str) -> dict[str, Any]:
    parent = click.Context(cli, **cli.context_settings)  # whose names of --help a command keeps from its first use on
    return all_commands(parent)[command].make_context(command, list(arguments), parent=parent).params


@pytest.mark.parametrize(
    ("command", "flag", "given", "value"),
    [
        ("generate", "--top-k", "16.0", ("top_k", 16)),
        ("generate", "--top-k", "-1", ("top_k", 0)),
        ("chat", "--top-k", "-1.0", ("top_k", 0)),
        ("generate", "-n", "16.0", ("max_new_tokens", 16)),
        ("chat", "-n", "-1.0", ("max_new_tokens", -1)),
        ("generate", "--limit", "2.", ("limit", 2)),
        ("generate", "--limit", "-1", ("limit", None)),
        ("generate", "--seed", "7.0", ("seed", 7)),
        ("generate", "--seed", "-1", ("seed", None)),
        ("chat", "--seed", "-1", ("seed", None)),
        ("generate", "-np", "4.0", ("parallel", 4)),
        ("generate", "-np", "-1", ("parallel", None)),
        ("generate", "-t", "-1", ("threads", None)),
        ("generate", "-c", "512.0", ("ctx_size", 512)),
        ("generate", "-c", "-1", ("ctx_size", None)),
        ("chat", "-ngl", "2.0", ("resident_layers", 2)),
        ("chat", "-ngl", "-1", ("resident_layers", None)),
        ("chat", "--tree-size", "8.0", ("size", 8)),
        ("chat", "--tree-size", "-1", ("size", None)),
        ("chat", "--tree-depth", "4.0", ("depth", 4)),
        ("bench", "-r", "3.0", ("repeats", 3)),
    ],
)
def test_numbers_are_read_as_programs_write_them(
    command: str, flag: str, given: str, value: tuple[str, object], tmp_path: Path
) -> None:
    arguments = [flag, given, *(["-p", "x"] if command == "generate" else [])]
    assert value in parsed(command, *arguments).items()


@pytest.mark.parametrize(
    ("flag", "given"),
    [("--top-k", "16.5"), ("-n", "1e3x"), ("--seed", "-2"), ("-np", "1.5"), ("-c", "2.5k"), ("--logprobs", "-1"),
     ("--tree-size", "2.5"), ("--limit", "nan"), ("--seed", "0.5")],
)  # fmt: skip
def test_what_is_no_whole_number_is_refused(flag: str, given: str) -> None:
    with pytest.raises(click.UsageError):
        parsed("generate", "-p", "x", flag, given)
