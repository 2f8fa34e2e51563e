"""A draft that costs more than it can bring: every command that uses one says so, with both costs, and goes on."""

import re

import pytest

from edgespec.doctor import profile_pair
from edgespec.pair.pair import DEMO_FOLDER
from tests.cli.conftest import RunCli

SMALL, LARGE = str(DEMO_FOLDER / "draft"), str(DEMO_FOLDER / "target")
NOTE = re.compile(
    r"the draft costs more than it can bring: for each token it reads (\S+) GiB of weights, and the target (\S+) GiB; "
    r"use a smaller one, --draft-quant, or --policy none"
)
COMMANDS = {
    "generate": ["-p", "def main(", "-n", "2"],
    "chat": ["-p", "def main(", "-n", "2", "--single-turn"],
    "estimate": [],
    "profile": [],
}


@pytest.fixture(autouse=True)
def _measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(profile_pair._Texts, "visit_sizes", interrupted)


@pytest.mark.parametrize("command", COMMANDS)
def test_it_is_said_with_both_costs(command: str, run_cli: RunCli) -> None:
    found = run_cli(["-m", SMALL, "-md", LARGE, *COMMANDS[command]], command=command)
    assert found.code == (130 if command == "profile" else 0), found.err
    note = NOTE.search(found.err)
    assert note
    assert float(note[1]) >= float(note[2]) > 0


@pytest.mark.parametrize(
    ("options", "is_costly"),
    [([], True), (["--quant", "nf4"], True), (["--draft-quant", "nf4"], False), (["--policy", "none"], False)],
    ids=["the target itself", "the target, unquantised", "the target, quantised", "not used"],
)
def test_costs_are_those_of_the_weights_as_they_are_kept(options: list[str], is_costly: bool, run_cli: RunCli) -> None:
    found = run_cli(["-m", LARGE, "-md", LARGE, *options], command="estimate").ended()
    assert bool(NOTE.search(found.err)) == is_costly


@pytest.mark.parametrize("command", COMMANDS)
def test_a_draft_that_is_smaller_is_nothing_to_talk_of(command: str, run_cli: RunCli) -> None:
    assert "costs more" not in run_cli(["-m", LARGE, "-md", SMALL, *COMMANDS[command]], command=command).err


def test_it_is_said_beside_what_is_said_of_profiles(run_cli: RunCli) -> None:
    files = {"p.txt": "def main("}
    assert NOTE.search(run_cli(["p.txt", "-n", "2", "-m", SMALL, "-md", LARGE, "--profile", "none"], files=files).err)
    assert NOTE.search(run_cli(["p.txt", "-n", "2", "-m", SMALL, "-md", LARGE, "--tree-size", "4"], files=files).err)


def test_a_packed_draft_is_not_to_be_packed(run_cli: RunCli) -> None:
    said = run_cli(["-m", LARGE, "-md", LARGE, "--quant", "nf4", "--draft-quant", "nf4"], command="estimate").err
    assert "use a smaller one or --policy none" in " ".join(said.split())
