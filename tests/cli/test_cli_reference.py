"""docs/cli.md is what the commands say of themselves."""

from __future__ import annotations

import pytest

from edgespec.cli import COMMANDS
from scripts.make_cli_reference import PATH, reference


def test_the_reference_is_up_to_date() -> None:
    assert PATH.read_text(encoding="utf-8") == reference(), "run: python scripts/make_cli_reference.py"


def test_it_is_the_same_in_every_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = reference()
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("EDGESPEC_CTX_SIZE", "77")
    assert reference() == whole
    assert max(map(len, whole.partition("## edgespec\n")[2].splitlines())) <= 120


def test_every_command_is_in_it() -> None:
    for name in [*COMMANDS, "config show"]:
        assert f"# edgespec {name}\n" in reference()
