"""Chats that are saved by themselves, and gone on with: `edgespec chat --resume`."""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgespec import Engine
from edgespec.cli.chat.actions import open_session
from edgespec.cli.chat.loop import converse
from edgespec.cli.chat.recent import MOST, last_chat, models_of, save_recent, show_last_turn
from edgespec.cli.chat.state import Chat
from edgespec.errors import EdgespecError
from edgespec.hub.names import BUILT_IN_TARGET
from tests.cli.chat.conftest import Lines, new_chat
from tests.cli.conftest import RunCli

Say = Callable[..., Chat]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def say(engine: Engine) -> Say:
    """A chat that is saved, after some lines."""

    def go(*lines: Any, chat: Chat | None = None) -> Chat:
        if chat is None:
            chat = new_chat(engine)
            chat.is_saved = True
        chat.read_message, chat.is_over = Lines(list(lines)), False
        assert converse(chat, None) == 0
        return chat

    return go


def files(home: Path) -> list[Path]:
    return sorted((home / "sessions/recent").glob("*"))


def test_each_answer_is_saved_for_the_user_alone_and_each_conversation_has_a_file(say: Say, home: Path) -> None:
    chat = say("def main(", "/stats")
    (file,) = files(home)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    before = file.stat().st_mtime_ns
    say("/show", chat=chat)
    assert file.stat().st_mtime_ns == before  # nothing was said
    say("import os", "/undo", "/set n=4", "import re", chat=chat)
    assert files(home) == [file]
    asked = [one["content"] for one in json.loads(file.read_text())["messages"] if one["role"] == "user"]
    assert asked == ["def main(", "import re"]
    say("/clear", "another", chat=chat)
    assert len(files(home)) == 2
    assert file.exists()
    assert last_chat() != file


def test_what_another_chat_wrote_and_what_a_user_saved_stays(say: Say, home: Path) -> None:
    chat, own = say("def main(", f"/save {home / 'own.json'}"), home / "own.json"
    saved = own.read_bytes()
    (file,) = files(home)
    other = say(f"/load {file}", "the other")
    assert files(home) == [file]
    told = file.read_bytes()
    say("the first", chat=chat)
    assert len(files(home)) == 2
    assert file.read_bytes() == told
    say(f"/load {own}", "more", chat=other)
    assert own.read_bytes() == saved
    assert len(files(home)) == 3


def test_the_last_ones_stay(say: Say, home: Path) -> None:
    folder = home / "sessions/recent"
    folder.mkdir(parents=True)
    (folder / "notes.txt").touch()
    for number in range(MOST + 3):
        (folder / f"{number:02}.json").write_text("{}")
        os.utime(folder / f"{number:02}.json", (number + 1, number + 1))
    say("def main(")
    assert len([path for path in files(home) if path.suffix == ".json"]) == MOST
    assert not (folder / "03.json").exists()
    assert (folder / "04.json").exists()
    assert (folder / "notes.txt").exists()


def test_nothing_is_saved_where_nobody_wants_it_or_it_cannot_be_which_is_said_once(
    say: Say, engine: Engine, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = new_chat(engine)
    say("def main(", chat=chat)
    assert not (home / "sessions").exists()
    (home / "sessions").write_text("no folder")
    say("def main(", "import os")
    assert capsys.readouterr().err.count("the chat is not saved, and --resume will not find it") == 1


def test_the_last_chat_goes_on_with_its_settings_but_for_what_is_given(
    say: Say, engine: Engine, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = say("/set n=5 seed=8 top_p=0.5", "/system Be brief.", "def main(")
    chat = new_chat(engine)
    open_session(chat, last_chat(), given={"seed"})
    show_last_turn(chat)
    assert chat.conversation.messages == first.conversation.messages
    assert chat.conversation.system == "Be brief."
    assert chat.conversation.options["max_new_tokens"] == 5
    assert chat.conversation.options.get("seed") is None
    assert f"> def main(\n{first.conversation.messages[-1].content}" in capsys.readouterr().err
    chat.is_saved = True
    save_recent(chat)
    assert len(files(home)) == 1  # it is saved to the same file, once something is said
    say("/save", chat=chat)
    (named,) = (home / "sessions").glob("*.json")
    assert last_chat() == named  # that the user saved last


def test_its_models_are_loaded_where_no_others_are_named(say: Say, home: Path, tmp_path: Path) -> None:
    say("def main(")
    (file,) = files(home)
    assert models_of(file).target is None  # the built-in pair, by no name
    content = json.loads(file.read_text())
    assert content["model"] == str(BUILT_IN_TARGET)
    file.write_text(json.dumps({**content, "model": str(tmp_path), "draft_model": "none"}))
    assert (models_of(file).target, models_of(file).draft) == (tmp_path, Path("none"))
    file.write_text(json.dumps({**content, "model": "/gone"}))
    with pytest.raises(EdgespecError, match="the last chat was with '/gone', which is not there"):
        models_of(file)


@pytest.mark.parametrize("options", [["--single-turn", "-p", "a"], []], ids=["one turn", "a pipe"])
def test_a_single_turn_resumes_nothing(options: list[str], run_cli: RunCli) -> None:
    outcome = run_cli(["--resume", *options], stdin="a", command="chat").ended(2)
    assert "--resume opens a chat on a terminal" in outcome.err


def test_where_nothing_is_saved_that_is_said() -> None:
    with pytest.raises(EdgespecError, match="no chat is saved here"):
        last_chat()


def test_the_list_of_what_is_kept_names_them(say: Say, home: Path, run_cli: RunCli) -> None:
    say("def main(")
    outcome = run_cli(["list"], command="cache")
    assert f"the last 1 chat, which are yours, and no part of this: {home / 'sessions/recent'}" in outcome.out
    run_cli(["clear", "--yes"], command="cache")
    assert len(files(home)) == 1
