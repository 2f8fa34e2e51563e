"""Files that take their name when they are whole: nobody can guess the one before, and each kind has its rights."""

import contextlib
import os
import stat
import sys
import time
from pathlib import Path

import pytest

from edgespec import user_paths
from edgespec.chat.session_file import write_session
from edgespec.cli.chat.line_editor import open_reader
from edgespec.prefix_cache.prompt_files import note_use
from edgespec.user_paths import make_folder, sessions_folder, written_whole
from profiles.files import write_profile
from tests.profiles.examples import example_profile

has_rights = pytest.mark.skipif(sys.platform == "win32", reason="no rights in a mode")


def rights(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(autouse=True)
def _umask() -> object:
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_what_lies_under_a_name_that_is_known_is_neither_written_nor_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even where the random part of the name is guessed."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    monkeypatch.setattr(user_paths.secrets, "token_hex", lambda _bytes: "guessed")
    for path in (tmp_path / "chat.json", tmp_path / "pair.toml"):
        for name in (f"{path.name}.partial", f".{path.name}.guessed.partial", ".guessed.partial"):
            if not (tmp_path / name).is_symlink():
                (tmp_path / name).symlink_to(victim)
    for write in (
        lambda: write_session(tmp_path / "chat.json", "secret", overwrite=True),
        lambda: write_profile(example_profile(), tmp_path / "pair.toml"),
    ):
        with pytest.raises(Exception, match="cannot"):
            write()
    assert victim.read_text() == "mine"


def test_a_file_is_there_whole_or_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("before")
    with contextlib.suppress(KeyboardInterrupt), written_whole(path) as partial:
        partial.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "before"
    with written_whole(path) as first, written_whole(path) as second:  # two writers do not share a file
        first.write_text("first")
        second.write_text("second")
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


def test_a_name_may_be_as_long_as_the_file_system_takes(tmp_path: Path) -> None:
    path = tmp_path / ("ä" * 127)
    with written_whole(path) as partial:
        partial.write_text("x")
    assert path.read_text() == "x"


def test_what_a_killed_process_left_goes_a_day_later(tmp_path: Path) -> None:
    old, new, other = (tmp_path / name for name in (".a.0.partial", ".a.1.partial", ".b.0.partial"))
    for left in (old, new, other):
        left.write_text("half")
    for left in (old, other):
        os.utime(left, (time.time() - 2 * user_paths.LEFT_OVER_S,) * 2)
    with written_whole(tmp_path / "a") as partial:
        partial.write_text("whole")
    assert {path.name for path in tmp_path.iterdir()} == {"a", new.name, other.name}


@has_rights
@pytest.mark.parametrize(
    ("is_private", "before", "after"),
    [(True, None, 0o600), (True, 0o644, 0o600), (False, None, 0o644), (False, 0o600, 0o600), (False, 0o664, 0o664)],
)
def test_private_files_are_the_users_and_others_keep_their_rights(
    is_private: bool, before: int | None, after: int, tmp_path: Path
) -> None:
    """Also where a library puts a file of its own in the place."""
    path, own = tmp_path / "file", tmp_path / "own"
    if before is not None:
        path.write_text("before")
        path.chmod(before)
    with written_whole(path, is_private=is_private) as partial:
        assert rights(partial) == (0o600 if is_private else 0o644)
        own.write_text("after")
        own.chmod(0o640)
        own.replace(partial)
    assert (path.read_text(), rights(path)) == ("after", after)


@has_rights
def test_chats_histories_and_notes_are_for_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the folders that are made for them; a session that was readable is tightened when it is saved again."""
    home = tmp_path / "home"
    monkeypatch.setenv("EDGESPEC_HOME", str(home))
    monkeypatch.setenv("TERM", "xterm")  # else lines are read without an editor, which has no history
    chat = sessions_folder() / "chat.json"
    for _ in range(2):
        write_session(chat, "{}", overwrite=True)
        assert rights(chat) == 0o600
        chat.chmod(0o644)
    note_use(tmp_path / "cache")
    open_reader(history=home / "state" / "history", words={}, file_commands=(), color=False)
    (note,) = (home / "prompts").iterdir()
    for file in (note, home / "state" / "history"):
        assert rights(file) == 0o600
    for folder in (home, chat.parent, note.parent, home / "state"):
        assert rights(folder) == 0o700


@has_rights
def test_folders_that_are_there_keep_their_rights(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    make_folder(tmp_path / "a" / "b")
    make_folder(tmp_path / "a" / "b")
    assert [rights(tmp_path / name) for name in (".", "a", "a/b")] == [0o755, 0o700, 0o700]
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        make_folder(tmp_path / "file" / "below")
