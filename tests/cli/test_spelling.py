"""Names in the library's messages become flags, commands of the chat, or keys of a row: what the reader can type."""

import ast
import json
import re

import click
import pytest

from edgespec.cli import cli, run
from edgespec.cli.chat.actions import ACTIONS
from edgespec.cli.config.groups import all_commands
from edgespec.cli.spelling import COMMANDS, FLAGS, SPELLINGS, spelled, spelled_error
from edgespec.errors import EdgespecError
from edgespec.tree.policies import POLICIES
from tests.test_architecture import SOURCES

OF_NO_SURFACE = {"hf auth login"}  # other programs, named as they are
COMPUTED = {"V", "V=V"}  # any tree setting or cheaper plan; either quantisation


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("`size=900` is not in [1, 768].", "--tree-size 900 is not in [1, 768]."),
        ("Leave it out to follow `temperature`.", "Leave it out to follow --temp."),
        ("`policy=none, context_tokens=256` (from 1 GiB)", "--policy none --ctx-size 256 (from 1 GiB)"),
        ("or leave out `local_files_only=False` for", "or leave out --online for"),
        ("overwrite it: `save(overwrite=True)`.", "overwrite it: /save! FILE."),
        ("oldest with `compact`, or all with `clear`", "oldest with /compact, or all with /clear"),
        ("log in: `hf auth login`", "log in: `hf auth login`"),
        ("`size, nothing=2` and size", "`size, nothing=2` and size"),
    ],
)
def test_known_names_in_backticks_are_spelled_and_all_else_stays(text: str, expected: str) -> None:
    assert spelled(text) == expected


def test_another_surface_has_other_spellings() -> None:
    assert spelled("`top_p=2` is not `size`", {"top_p": "top_p"}) == "top_p 2 is not `size`"


def test_an_error_keeps_its_code() -> None:
    said = spelled_error(EdgespecError("E_SETTING", "`depth=0` is below 1.", "Try `depth=24`."))
    assert (said.code, said.what, said.fix) == ("E_SETTING", "--tree-depth 0 is below 1.", "Try --tree-depth 24.")


def test_an_error_as_json_says_what_the_lines_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["estimate", "--tree-size", "900"]) == 2
    assert capsys.readouterr().err.startswith("Error: --tree-size 900 is not in [1, 768].\nTry: Use --policy none to")
    assert run(["estimate", "--tree-size", "900", "--json"]) == 2
    said = json.loads(capsys.readouterr().err)["error"]
    assert said["message"] == "--tree-size 900 is not in [1, 768]."
    assert said["fix"] == "Use --policy none to decode without a tree."


def names_in_messages() -> set[str]:
    """What stands in backticks in the library's strings, docstrings aside; a value that is computed is written V.

    The table of requests' fields speaks to clients, in their names.
    """
    found = set()
    for path in (path for path in SOURCES if "cli" not in path.parts and path.name != "field_table.py"):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        skipped = docstrings | {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in nodes:
            if id(node) in skipped:
                continue
            if isinstance(node, ast.JoinedStr):
                text = "".join(str(part.value) if isinstance(part, ast.Constant) else "V" for part in node.values)
                found |= set(re.findall("`([^`]+)`", text))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= set(re.findall("`([^`]+)`", node.value))
    return found - OF_NO_SURFACE


def test_every_name_in_the_library_s_messages_has_a_spelling() -> None:
    named = {name for name in names_in_messages() if name not in COMPUTED}
    assert len(named) > 40
    assert {name for name in named if spelled(f"`{name}`").startswith("`")} == set()


def test_every_name_that_has_a_spelling_is_in_a_message() -> None:
    named = names_in_messages()
    named |= {name.partition("=")[0] for name in named}
    of_policies = {setting for policy in POLICIES.values() for setting in policy.settings}
    assert SPELLINGS.keys() <= named | of_policies | {"draft_quant", "draft_revision"}  # the draft's come by `V=V`


def test_every_spelling_is_a_flag_or_a_command_that_there_is() -> None:
    commands = all_commands(click.Context(cli))
    options = {word for command in commands.values() for option in command.params for word in option.opts}
    assert set(FLAGS.values()) <= options
    for spelling in COMMANDS.values():
        word, *rest = spelling.split()
        if word == "edgespec":
            name, flag = rest
            assert flag in {word for option in commands[name].params for word in option.opts}
        else:
            assert word.removeprefix("/") in ACTIONS
