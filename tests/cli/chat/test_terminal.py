"""The chat in a real terminal: keys, interrupts, and two processes that continue one conversation."""

import io
import os
import re
import stat
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("needs a pseudo-terminal", allow_module_level=True)

import pexpect

ROOT = Path(__file__).parents[3]
READY = re.escape("\x1b[?2004h")  # the line editor asks for bracketed paste whenever it begins a line
PASTE = "\x1b[200~{}\x1b[201~"
SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]")


class Terminal:
    """A program in a terminal of its own."""

    def __init__(
        self, arguments: list[str], home: Path, *, program: Sequence[str] = (sys.executable,), **environment: str
    ) -> None:
        self.child = pexpect.spawn(
            program[0],
            [*program[1:], *arguments],
            cwd=str(ROOT),
            env={
                **os.environ,
                "EDGESPEC_HOME": str(home),
                "OMP_NUM_THREADS": "1",
                "PROMPT_TOOLKIT_NO_CPR": "1",
                "TERM": "xterm",
                **environment,
            },
            encoding="utf-8",
            timeout=90,
            dimensions=(30, 120),
        )

    def ready(self) -> str:
        """What was written until the next line can be typed."""
        self.child.expect(READY)
        return SEQUENCE.sub("", self.child.before).replace("\r", "")

    def see(self, text: str) -> None:
        self.child.expect_exact(text)

    def keys(self, keys: str) -> None:
        self.child.send(keys)

    def line(self, text: str) -> str:
        """Type a line; what was answered until the next can be typed."""
        self.keys(f"{text}\r")
        return self.ready()

    def end(self) -> int:
        self.child.expect(pexpect.EOF)
        self.child.close()
        return self.child.exitstatus if self.child.exitstatus is not None else -self.child.signalstatus


@pytest.fixture
def stub(tmp_path: Path, warm: list[str]) -> Iterator[Terminal]:
    terminal = Terminal(["-m", "tests.cli.chat.chat_stub", str(tmp_path / "history")], tmp_path, program=warm)
    terminal.ready()
    yield terminal
    terminal.child.close(force=True)


def test_every_way_to_write_several_lines_sends_them_once(stub: Terminal) -> None:
    assert r"GOT 'one\ntwo\nthree'" in stub.line(PASTE.format("one\r\ntwo\nthree"))
    assert r"GOT 'a\nb'" in stub.line("a\x1b\rb")
    assert r"GOT 'a\nb'" in stub.line("a\nb")
    assert r"GOT 'a\nb\\\\'" in stub.line("a\\\rb\\\\")
    assert r"GOT 'a\n\nb'" in stub.line('"""\ra\r\rb\r"""')
    # Slashes: a message, a command, and one that there is not.
    assert "GOT '/etc/passwd'" in stub.line("//etc/passwd")
    answer = stub.line("/undu")
    assert "Did you mean /undo?" in answer
    assert "GOT" not in answer
    stub.keys("\x04")
    assert stub.end() == 0


def test_keys_at_the_prompt(stub: Terminal, tmp_path: Path) -> None:
    stub.line("first")
    stub.keys("gone\x03")
    assert "GOT 'first'" in stub.line("\x1b[A")  # Up; what Ctrl-C cleared is not there
    stub.keys("\x03")
    stub.see("Use Ctrl-D or /exit to leave")
    stub.ready()
    stub.keys("x" * 150)
    stub.child.setwinsize(12, 40)  # the window becomes narrower while a line is in it
    time.sleep(0.2)
    stub.keys("y\r")
    stub.see(f"\n'{'x' * 150}y'")  # a word begins on a line of its own where it does not fit
    stub.ready()
    for keys in ("/sh\t", " mem\t", "\x1b[H\x1b[3~"):  # completed, and then made a message
        stub.keys(keys)
        time.sleep(0.3)
    assert "GOT 'show memory'" in stub.line("")
    assert stat.S_IMODE((tmp_path / "history").stat().st_mode) == 0o600
    assert "x" * 150 in (tmp_path / "history").read_text()
    stub.keys("/exit\r")
    assert stub.end() == 0


def test_an_editor_opens_on_the_line(tmp_path: Path, warm: list[str]) -> None:
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\nprintf "from an editor" > "$1"\n')
    editor.chmod(0o755)
    arguments = ["-m", "tests.cli.chat.chat_stub", str(tmp_path / "history")]
    stub = Terminal(arguments, tmp_path, program=warm, VISUAL=str(editor))
    stub.ready()
    stub.keys("typed\x07")
    stub.see("from an editor")
    assert "GOT 'from an editor'" in stub.line("")
    stub.child.close(force=True)


def test_what_others_wrote_reaches_a_real_terminal_written_out(stub: Terminal, tmp_path: Path) -> None:
    """Answers, what is typed and pasted, and names of files that are completed."""
    (tmp_path / "\x1b]0;owned\x07\x9b2Jname").touch()
    stub.child.logfile_read = io.StringIO()
    assert r"\x1b]0;owned\x07\x9b2J\r\x08" in stub.line(r"say \x1b]0;owned\x07\x9b2J\r\x08.")
    stub.line(PASTE.format("pasted \x1b[2J \x9b2J"))
    stub.keys(f"/read {tmp_path}/\x1b]\t")
    time.sleep(0.3)
    stub.keys("\x03")
    stub.keys(f"/read {tmp_path}/\t\t")
    time.sleep(0.3)
    stub.keys("\x03\x04")
    assert stub.end() == 0
    written = stub.child.logfile_read.getvalue()
    assert "2J" in written
    for sequence in ("\x1b]0;", "\x1b[2J", "\x9b", "\x07"):
        assert sequence not in written


def test_interrupts_of_an_answer(tmp_path: Path, warm: list[str]) -> None:
    """The first stops, the second abandons, the third ends the program and leaves the terminal as it was."""
    program = [*warm, "-m", "tests.cli.chat.chat_stub", str(tmp_path / "history")]
    # A shell around it tells the terminal's state afterwards; it must not die of the same Ctrl-C.
    script = 'trap : INT; "$@"; echo "left with $?"; stty -a'
    stub = Terminal(["-c", script, "sh", *program], tmp_path, program=["/bin/sh"])
    stub.ready()
    stub.keys("short\r")
    stub.see("tick tick")
    stub.keys("typed ahead\r")  # waits, and is not written into the answer
    stub.see("tick ended short")
    stub.see("GOT 'typed ahead'")
    stub.ready()
    stub.keys("slow\r")
    stub.see("tick tick")
    stub.keys("\x03")
    stub.see("stopping after this pass")
    stub.see("ended slow")
    stub.ready()
    stub.keys("deep\r")
    stub.see("tick tick")
    stub.keys("\x03")
    stub.see("stopping")
    stub.keys("\x03")
    stub.see("abandoning")
    stub.see("ended deep")
    stub.ready()
    stub.keys("stuck\r")
    stub.see("tick tick")
    for notice in ("stopping", "abandoning"):
        stub.keys("\x03")
        stub.see(notice)
    stub.keys("\x03")
    stub.see("left with 130")
    stub.child.expect(r"(-?)icanon\b.* (-?)echo\b")
    assert stub.child.match.groups() == ("", "")
    stub.child.close(force=True)


def test_ctrl_c_while_loading_leaves_with_130(tmp_path: Path) -> None:
    # A load that lasts: the built-in pair's is over before a key can be pressed.
    slowly = "engine.Engine.__init__ = lambda *_, **__: time.sleep(60)"
    program = f"import sys, time; from edgespec import cli, engine; {slowly}; sys.argv[1:] = ['chat']; cli.main()"
    terminal = Terminal(["-c", program], tmp_path)
    terminal.see("edgespec 0.1.0")
    terminal.keys("\x03")
    terminal.see("stopped: interrupted\r\n")
    assert terminal.end() == 130
    assert terminal.child.before == ""


@pytest.mark.parametrize("command", ["chat", "estimate"])  # `test_ctrl_c` has all
@pytest.mark.parametrize("after_s", [0.0, 0.4])
def test_ctrl_c_while_importing_leaves_with_130_and_no_trace(command: str, after_s: float, tmp_path: Path) -> None:
    """An exception in the middle of an import would come out of it as another one, or not at all."""
    program = (
        f"import sys; from edgespec import cli; print('begun', flush=True); sys.argv[1:] = ['{command}']; cli.main()"
    )
    terminal = Terminal(["-c", program], tmp_path)
    terminal.see("begun")
    time.sleep(after_s)
    if not terminal.child.isalive():
        pytest.skip("it was over before")
    terminal.keys("\x03")
    assert terminal.end() == 130
    assert terminal.child.before.count("stopped: interrupted") == 1
    assert "Error" not in terminal.child.before
    assert "Traceback" not in terminal.child.before


def test_the_history_is_that_of_earlier_chats_too(tmp_path: Path, warm: list[str]) -> None:
    """Messages of several lines come back whole, and Ctrl-R finds them."""
    arguments = ["-m", "tests.cli.chat.chat_stub", str(tmp_path / "history")]
    first = Terminal(arguments, tmp_path, program=warm)
    first.ready()
    for keys in ("one apple", PASTE.format("two\npears"), "three plums"):
        first.line(keys)
    first.keys("\x04")
    assert first.end() == 0
    second = Terminal(arguments, tmp_path, program=warm)
    second.ready()
    assert r"GOT 'two\npears'" in second.line("\x1b[A\x1b[A\x1b[A\x1b[B")  # up to the first, and down again
    for keys in ("\x12", "apple", "\r"):  # the last accepts what was found, and sends nothing yet
        second.keys(keys)
        time.sleep(0.3)
    assert "GOT 'one apple'" in second.line("")
    for keys in ("\x12", "plum", "\x07"):  # Ctrl-G leaves the search, and opens no editor
        second.keys(keys)
        time.sleep(0.3)
    assert "GOT 'typed'" in second.line("typed")
    second.keys("\x04")
    assert second.end() == 0


def test_lines_are_broken_for_the_window_as_it_is_also_where_it_changes_in_an_answer(
    tmp_path: Path, warm: list[str]
) -> None:
    terminal = Terminal(["-m", "edgespec", "chat", "--temp", "0", "-n", "80"], tmp_path, program=warm)
    terminal.child.setwinsize(30, 40)
    terminal.ready()
    pieces = re.split(r"\r\n|\r|\n|\x1b\[\d*[AK]", terminal.child.before)  # what is drawn over stands alone
    shown = [SEQUENCE.sub("", piece) for piece in pieces]
    lines = [line for line in shown if line.strip() and "MiB" not in line and "loading" not in line]
    assert max(map(len, lines)) <= 40
    text = " ".join(line.strip() for line in lines)
    assert "adaptive trees of up to 256 nodes, as many as pay" in text
    assert "no chat template: your text and the model's are one, and it continues yours" in text
    terminal.child.setwinsize(40, 150)
    terminal.keys("x" * 100 + "\r")
    terminal.see("x" * 100)  # in one line
    assert len(footer_of(terminal.ready())) > 40
    terminal.keys("import os\r")
    terminal.see("\n")
    terminal.child.setwinsize(20, 40)
    assert len(footer_of(terminal.ready())) < 40
    terminal.keys("\x04")
    assert terminal.end() == 0


def footer_of(written: str) -> str:
    """The line below an answer."""
    found = re.findall(r"^\d+ tok · .*$", written, re.MULTILINE)
    assert found, written
    return str(found[-1])


def test_a_conversation_on_the_built_in_pair(tmp_path: Path, warm: list[str]) -> None:
    """Interrupted while it answers and while it reads, regenerated, saved; and gone on with in a new process."""
    options = ["-m", "edgespec", "chat", "--temp", "0", "-n", "1500", "--tree-size", "8"]
    terminal = Terminal(options, tmp_path, program=warm)
    banner = terminal.ready()
    assert len(re.findall(r"\n.*(?:edgespec 0|layers resident|context|chat template|/help)", "\n" + banner)) == 5
    terminal.keys("def fib(n):\r")
    terminal.see('"""')
    terminal.keys("\x03")
    terminal.see("stopping")
    assert "stopped: interrupted" in terminal.ready()
    # Again, shorter: nothing is read anew.
    terminal.line("/set n=12")
    again = terminal.line("/regen")
    assert re.search(r"\b12 tok\b.* prefill 0 tok \(\d+ kept\)", again)
    # A long text, left while it is read: it was never said.
    (tmp_path / "long.py").write_text("value = compute(value)\n" * 450)
    assert "of the context" in " ".join(terminal.line(f"/read {tmp_path / 'long.py'}").split())  # long paths wrap it
    terminal.keys("\r")
    time.sleep(0.3)
    terminal.keys("\x03")
    terminal.see("stopping")
    left = terminal.ready()
    assert "nothing was answered" in left or "stopped: interrupted" in left
    if "stopped" in left:
        terminal.line("/undo")
    session = tmp_path / "s.json"
    assert "saved 1 turn to" in terminal.line(f"/save {session}")
    terminal.line("/clear")
    assert "loaded 1 turn," in terminal.line(f"/load {session}")
    expected = answer_of(terminal.line("    # and then"))
    terminal.keys("\x04")
    assert terminal.end() == 0

    other = Terminal([*options[:-4], "--policy", "none", "--resume"], tmp_path, program=warm)  # first one's settings
    banner = other.ready()
    assert "loaded 2 turns," in banner
    assert expected.splitlines()[-1].strip() in banner
    other.line("/undo")
    found = answer_of(other.line("    # and then"))
    assert found == expected
    assert found.strip()
    assert "# and then" in other.line("\x1b[A")  # the history of both
    other.keys("/bye\r")
    assert other.end() == 0


def answer_of(written: str) -> str:
    """What a model said, between the line that was typed and the footer."""
    match = re.search(r"# and then *\n(.*?)\n?12 tok ", written, re.DOTALL)
    assert match, written
    return match[1].lstrip("\n")
