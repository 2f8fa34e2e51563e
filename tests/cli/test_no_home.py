"""A user without a home folder, as in a container: all runs, and what must be written says what to set."""

from pathlib import Path
from typing import NoReturn

import pytest
from prompt_toolkit.history import InMemoryHistory

from edgespec import EdgespecError, Engine, user_paths
from edgespec.cli.chat.line_editor import _history
from tests.cli.conftest import RunCli

PLACES = ("user_cache_path", "user_config_path", "user_data_path", "user_state_path")
KINDS = ["none", "relative", "unwritable"]


@pytest.fixture(params=KINDS)
def home(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """What the user has for a home, nowhere or in a place where nothing can be made."""
    (tmp_path / "file").touch()
    monkeypatch.delenv("EDGESPEC_HOME")

    def nobodys(*_: object, **__: object) -> NoReturn:
        raise RuntimeError("could not determine the home directory")

    places = {
        "none": nobodys,
        "relative": lambda *_, **__: Path("~/.cache/edgespec"),
        "unwritable": lambda *_, **__: tmp_path / "file" / "edgespec",
    }
    for name in PLACES:
        monkeypatch.setattr(user_paths, name, places[request.param])
    user_paths._cache_of_process.cache_clear()
    return str(request.param)


def test_everything_runs_and_nothing_is_written_beside_ones_work(
    home: str, run_cli: RunCli, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for command, arguments in (
        ("generate", ["-p", "def", "-n", "2", "--quant", "nf4", "--draft-quant", "nf4"]),
        ("models", []), ("cache", ["list"]), ("doctor", []), ("profile", ["--list"]), ("config", ["show"]),
    ):  # fmt: skip
        done = run_cli(arguments, command=command)
        assert (done.code, "Traceback" in done.err) == (0, False), done.err
        if command == "generate":
            assert caplog.text.count("nothing is kept for later runs") == 1
    assert not list((tmp_path / "cwd").iterdir())


def test_what_must_be_written_says_what_to_set(home: str, run_cli: RunCli) -> None:
    refused = run_cli(["init"], command="config")
    assert refused.code != 0
    assert refused.err.count("Error: ") == 1
    assert "Set EDGESPEC_HOME" in refused.err
    if home != "unwritable":
        refused = run_cli([], command="profile")
        assert "the user has no home folder" in refused.err
        assert "Set EDGESPEC_HOME" in refused.err


def test_a_chat_has_no_history_and_says_so(home: str) -> None:
    history, note = _history(user_paths.history_file())
    assert isinstance(history, InMemoryHistory)
    assert note is not None
    assert "EDGESPEC_HOME" in note


def test_an_engine_needs_no_home(home: str) -> None:
    with Engine.from_pretrained(context_tokens=64, self_check=False) as engine:
        assert engine.generate("def ", max_new_tokens=2).token_ids


def test_a_path_below_an_unknown_home_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobodys(_: Path) -> NoReturn:
        raise RuntimeError

    monkeypatch.setattr(Path, "expanduser", nobodys)
    with pytest.raises(EdgespecError, match="below a home folder that is not known"):
        user_paths.expanded("~/s.json")
