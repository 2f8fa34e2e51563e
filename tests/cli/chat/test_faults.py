"""A fault in one answer ends no chat: the conversation stays, is in a file, and the next line is answered."""

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgespec import Engine
from edgespec.cli.chat.loop import converse
from edgespec.cli.chat.state import Chat
from edgespec.cli.ctrl_c import Terminated
from edgespec.cli.standard_streams import StdoutError
from edgespec.errors import EdgespecError
from tests.cli.chat.conftest import Lines, new_chat


@pytest.fixture
def chat(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Chat:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    return new_chat(engine)


def failing_once(chat: Chat, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message `fail` fails, behind its first token."""
    stream = chat.conversation.stream

    def go(text: str, **options: Any) -> Iterator[Any]:
        for chunk in stream(text, **options):
            yield chunk
            if text == "fail":
                raise error

    monkeypatch.setattr(chat.conversation, "stream", go)


@pytest.mark.parametrize(
    "error",
    [
        EdgespecError("E_READ_FAILED", "a file has gone.", "Bring it back."),
        EdgespecError("E_CHAT_TEMPLATE", "the template fails.", "Mend it."),
        RuntimeError("nobody foresaw this"),
        UnicodeEncodeError("utf-8", "\udcfc", 0, 1, "surrogates not allowed"),
        OSError(12, "Cannot allocate memory"),
        MemoryError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_any_fault_is_said_and_the_next_line_is_answered(
    error: Exception, chat: Chat, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_once(chat, error, monkeypatch)
    chat.read_message = Lines(["def main(", "fail", "import os", "/stats"])
    assert converse(chat, None) == 0
    assert [message.content for message in chat.conversation.messages if message.role == "user"][::2] == [
        "def main(", "import os",
    ]  # fmt: skip
    said = capsys.readouterr().err
    assert len(re.findall(r"^Error: ", said, re.MULTILINE)) == 1
    assert "Traceback" not in said
    assert ("unexpected RuntimeError: nobody foresaw this" in said) == isinstance(error, RuntimeError)


def test_what_a_fault_left_is_in_a_file_that_load_reads(
    chat: Chat, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_once(chat, RuntimeError("odd"), monkeypatch)
    chat.read_message = Lines(["def main(", "fail", "fail"])
    assert converse(chat, None) == 0
    assert chat.kept is not None
    assert capsys.readouterr().err.count(f"the conversation is kept: /load {chat.kept}") == 2
    assert len(json.loads(chat.kept.read_text())["messages"]) == len(chat.conversation.messages)
    chat.read_message = Lines(["/clear", f"/load {chat.kept}", "import os"])
    assert converse(chat, None) == 0
    assert chat.conversation.num_turns == 4


@pytest.mark.parametrize("error", [Terminated(15), StdoutError(5, "gone"), BrokenPipeError()])
def test_what_ends_the_program_leaves_the_conversation_in_a_file(
    error: BaseException, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_once(chat, error, monkeypatch)
    chat.read_message = Lines(["def main(", "fail"])
    with pytest.raises(type(error)):
        converse(chat, None)
    assert chat.kept.exists()


@pytest.mark.parametrize(
    ("typed", "content"),
    [("gr\udcfc\udcdfe", "gr\ufffd\ufffde"), ('x = "\udce2\udc82', 'x = "\ufffd\ufffd'), ("\ud83d!", "\ufffd!")],
)
def test_bytes_that_are_not_utf8_stand_as_u_fffd_and_that_is_said(
    typed: str, content: str, chat: Chat, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a message, a system message, one that is edited, and in any command."""
    chat.read_message = Lines(
        [typed, f"/system {typed}", "/system", typed, "/edit", typed, f"/nothing {typed}", "def f("]
    )
    assert converse(chat, None) == 0
    assert chat.conversation.messages[0].content == content
    assert chat.conversation.system == content
    said = capsys.readouterr().err
    assert said.count("not UTF-8, and read as \ufffd") == 5
    assert len(re.findall(r"^Error: ", said, re.MULTILINE)) == 1  # there is no command of that name
    assert chat.conversation.num_turns == 2


@pytest.mark.parametrize("name", ["no\0file", "x" * 5000, "."])
def test_read_refuses_a_name_that_no_file_can_have(name: str, chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    chat.read_message = Lines([f"/read {name}", "a\0b\x1b"])
    assert converse(chat, None) == 0
    said = capsys.readouterr().err
    assert "Error: cannot read" in said
    assert "unexpected" not in said
    assert chat.conversation.num_turns == 1


if sys.platform != "win32":
    from tests.cli.chat.test_terminal import Terminal

    def begun(folder: Path, **options: Any) -> Terminal:
        return Terminal(["-m", "tests.cli.chat.chat_stub", str(folder / "history")], folder, **options)

    @pytest.mark.parametrize(("at_once", "later"), [("one\rtw", "o\rthree\r\x04"), ("one\rtwo\rthree\r\x04", "")])
    def test_lines_typed_while_a_chat_loads_are_its_first_messages(
        at_once: str, later: str, tmp_path: Path, warm: list[str]
    ) -> None:
        """Those of the first moment, when the terminal still has lines of its own, and those that come later."""
        terminal = begun(tmp_path, STUB_LOADS_S="1", program=warm)
        terminal.child.delaybeforesend = None
        terminal.keys(at_once)
        time.sleep(0.7)
        terminal.keys(later)
        for message in ("one", "two", "three"):
            terminal.see(f"GOT '{message}'")
        assert terminal.end() == 0

    @pytest.mark.parametrize("kind", ["dumb", "unknown", ""])
    def test_a_dumb_terminal_gets_plain_lines_and_reads_lines(kind: str, tmp_path: Path, warm: list[str]) -> None:
        terminal = begun(tmp_path, TERM=kind, program=warm)
        terminal.keys("one\r")
        terminal.see("GOT 'one'")
        shown = terminal.child.before
        terminal.keys("short\r")
        terminal.see("tick")
        terminal.keys("ahead\r")
        terminal.see("GOT 'ahead'")
        shown += terminal.child.before
        assert "\x1b" not in shown
        assert not any("\r" in line.strip("\r") for line in shown.split("\n"))  # nothing is drawn over
        terminal.keys("\x04")
        assert terminal.end() == 0

    def test_bytes_of_latin_1_are_read_with_a_word_and_the_chat_goes_on(tmp_path: Path, warm: list[str]) -> None:
        terminal = begun(tmp_path, program=warm)
        terminal.ready()
        os.write(terminal.child.child_fd, b"gr\xfc\xdfe\r")
        terminal.see("2 bytes of what was typed")
        terminal.see("GOT 'gr\ufffd\ufffde'")
        os.write(terminal.child.child_fd, b"x\xe2\x82\r")  # a paste that was cut
        terminal.see("GOT 'x\ufffd")
        terminal.keys("\x04")
        assert terminal.end() == 0
