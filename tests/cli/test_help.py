"""Help: what most people need on its first screen, everything somewhere, and a hint where a word was wrong."""

import re
from pathlib import Path
from typing import Any

import click
import pytest

from edgespec.cli import cli
from edgespec.cli.config.groups import all_commands
from edgespec.cli.options.sections import FIRST, SectionedCommand
from tests.cli.conftest import RunCli

SECTIONED = ("chat", "generate")
VERBS = re.compile(
    "(Add|Append|Begin|Check|Choose|Clip|Colour|Compare|Complete|Compute|Continue|Copy|Decode|Divide|Download|Draft|"
    "Draw|Drop|End|Estimate|Evaluate|Give|Grow|Keep|Learn|Leave|Let|Limit|Look|Make|Measure|Move|Never|Plan|Print|Put|Quantise|"
    "Reach|Read|Record|Remove|Replace|Run|Say|Send|Set|Show|Skip|Spread|Start|Stop|Take|Tell|Train|Use|Weigh|Write) "
)


def context_of(command: click.Command, **options: Any) -> click.Context:
    """A context as a run has it: a command keeps the help option of its first one."""
    return click.Context(command, help_option_names=["-h", "--help"], **options)


def command_named(name: str) -> SectionedCommand:
    found = all_commands(context_of(cli, info_name="edgespec"))[name]
    assert isinstance(found, SectionedCommand)
    return found


def help_of(name: str) -> str:
    return command_named(name).get_help(context_of(command_named(name), info_name=name, terminal_width=80))


@pytest.mark.parametrize("name", SECTIONED)
def test_the_first_screen_has_what_most_people_need(name: str) -> None:
    """In thirty lines: examples, prompts and results, models, length, temperature and memory; nothing of trees."""
    first = help_of(name).partition(f"\n{'Prompts' if name == 'generate' else 'Chat'}:\n")[0]
    assert len(first.splitlines()) <= 30
    assert "Examples:" in first
    for flag in ["-p", "-m", "-md", "-n", "--temp", "--system", "--max-gpu-mem"]:
        assert re.search(rf"^  (-\S+, )*{flag}\b", first, re.MULTILINE), flag
    assert name == "chat" or ("-o, --output" in first and "--resume" in first)
    assert "tree" not in first
    assert "--policy" not in first


@pytest.mark.parametrize("name", SECTIONED)
def test_every_option_stands_in_one_section_with_all_its_spellings(name: str) -> None:
    command, text = command_named(name), help_of(name)
    for option in command.params:
        for spelling in (*option.opts, *option.secondary_opts):
            count = len(re.findall(rf"(?<![\w-]){re.escape(spelling)}(?![\w-])", text))
            assert count or not spelling.startswith("-"), spelling
        shown = re.findall(rf"(?m)^  (?:-\S+, )*{re.escape(option.opts[0])}(?:,| )", text.partition("\nOther ")[0])
        assert len(shown) == 1 or not option.opts[0].startswith("-"), option.opts
    assert FIRST in command.sections


def test_names_of_sections_are_those_of_options() -> None:
    known = {str(option.name) for name in SECTIONED for option in command_named(name).get_params(context_of(cli))}
    placed = {option for name in SECTIONED for options in command_named(name).sections.values() for option in options}
    assert placed <= known


@pytest.mark.parametrize("name", SECTIONED)
def test_policies_and_shapes_are_advanced(name: str) -> None:
    advanced = help_of(name).partition("\nAdvanced (policies and shapes of trees):\n")[2]
    for flag in ("--policy", "--tree-size", "--branching", "--draw", "--profile"):
        assert f"\n  {flag} " in f"\n{advanced}"
        assert f"\n  {flag} " not in help_of(name).removesuffix(advanced)


@pytest.mark.parametrize(
    ("line", "meant"), [(["genrate"], "generate"), (["chta"], "chat"), (["train", "haed"], "head"), (["xyzzy"], None)]
)
def test_an_unknown_command_gets_a_suggestion(line: list[str], meant: str | None, run_cli: RunCli) -> None:
    outcome = run_cli(line[1:], command=line[0]).ended(2)
    assert f"No such command '{line[-1]}'." in outcome.err
    assert ("Did you mean" in outcome.err) == (meant is not None)
    assert meant is None or f"Did you mean '{meant}'?" in outcome.err


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("def main(", "A prompt itself: -p 'def main('"),
        ("Why?", "A prompt itself: -p 'Why?'"),
        ("x" * 300, f"-p {'x' * 60}..."),
        ("prompts.jsonl", None),
    ],
)
def test_a_prompt_in_a_files_place_is_told_of_p(given: str, hint: str | None, run_cli: RunCli) -> None:
    outcome = run_cli([given]).ended(4)
    assert (" -p " in outcome.err) == (hint is not None)
    assert hint is None or hint in outcome.err
    assert len(outcome.err) < 400
    assert not Path(given[:100]).exists()


def test_every_help_text_is_a_sentence_that_begins_with_a_verb() -> None:
    options = {
        (name, option.opts[-1]): option.help or ""
        for name, command in all_commands(context_of(cli, info_name="edgespec")).items()
        for option in command.params
        if isinstance(option, click.Option)
    }
    for where, text in options.items():
        assert VERBS.match(text), (where, text)
        assert re.search(r"\.( \[.*\])?$", text), (where, text)


def test_the_list_of_commands_says_what_each_is_for_in_one_whole_line() -> None:
    """At eighty columns nothing is cut off with dots, or goes on in a second line."""
    text = cli.get_help(context_of(cli, info_name="edgespec", terminal_width=80))
    lines = text.partition("\nCommands:\n")[2].partition("\n\n")[0].splitlines()
    assert [line.split()[0] for line in lines] == cli.list_commands(context_of(cli))
    assert all(line.endswith(".") and not line.endswith("...") for line in lines), text
