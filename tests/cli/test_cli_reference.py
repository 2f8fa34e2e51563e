"""docs/cli.md is what the commands say of themselves, and docs/generate.md has the keys of rows that the code has."""

from __future__ import annotations

import pytest

from edgespec.cli import COMMANDS
from scripts.make import row_keys as make_row_keys
from scripts.make.cli_reference import PATH, reference


def test_the_reference_is_up_to_date() -> None:
    assert PATH.read_text(encoding="utf-8") == reference(), "run: python -m scripts.make.cli_reference"


def test_it_is_the_same_in_every_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = reference()
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("EDGESPEC_CTX_SIZE", "77")
    assert reference() == whole
    assert max(map(len, whole.partition("## edgespec\n")[2].splitlines())) <= 120


def test_every_command_is_in_it() -> None:
    for name in [*COMMANDS, "config show"]:
        assert f"# edgespec {name}\n" in reference()


def test_the_list_of_keys_is_up_to_date() -> None:
    page = make_row_keys.PATH.read_text(encoding="utf-8")
    assert page == make_row_keys.page_with_list(page), "run: python -m scripts.make.row_keys"
    assert "| `max_new_tokens` | `max_tokens`," in page
