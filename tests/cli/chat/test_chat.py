"""`edgespec chat`: pipes, options and commands; keys and terminals are in test_chat_terminal.py."""

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edgespec import Engine, SamplingSettings, TreeSettings
from edgespec.chat.chat_template import Message
from edgespec.chat.conversation import Conversation
from edgespec.cli.chat import command as chat_command
from edgespec.cli.chat.actions import ACTIONS, handle_command
from edgespec.cli.chat.answers import answer, footer
from edgespec.cli.chat.command import command
from edgespec.cli.chat.loop import HINT, converse
from edgespec.cli.chat.parse import parse, wants_more, without_quotes
from edgespec.cli.chat.screen import Screen
from edgespec.cli.chat.settings import SETTINGS
from edgespec.cli.chat.state import Chat
from edgespec.cli.console import Console
from edgespec.cli.prefill_line import PrefillLine
from edgespec.cli.standard_streams import visible_streams
from edgespec.config import MemoryLimits
from edgespec.errors import EdgespecError
from edgespec.placement.pair_setup import PairSetup
from edgespec.placement.run_config import RunConfig
from edgespec.text.results import GenerationResult, TextChunk
from edgespec.tuning.step import StepResult
from tests.cli.chat.conftest import Lines, new_chat
from tests.cli.conftest import RunCli

GREEDY = SamplingSettings()
ROOT = Path(__file__).parents[3]
Talk = Callable[..., tuple[Chat, str, str]]


@pytest.fixture
def talk(engine: Engine, capsys: pytest.CaptureFixture[str]) -> Talk:
    """A chat that has gone through some lines, and what it wrote to stdout and stderr."""

    def go(*lines: Any, chat: Chat | None = None) -> tuple[Chat, str, str]:
        if chat is None:
            chat = new_chat(engine)
        chat.read_message, chat.is_over = Lines(list(lines)), False
        capsys.readouterr()
        assert converse(chat, None) == 0
        written = capsys.readouterr()
        return chat, written.out, written.err

    return go


def test_a_pipe_is_one_turn_with_the_answer_alone_on_stdout(run_cli: RunCli) -> None:
    options = ["--temp", "0", "-n", "7", "--tree-size", "4"]
    outcome = run_cli(options, stdin="def f(x):\n    return\n", command="chat").ended()
    with Engine.from_pretrained(dtype="float32", self_check=False) as engine:
        expected = engine.generate("def f(x):\n    return", max_new_tokens=7, sampling=GREEDY).text
    assert outcome.out == expected + "\n"
    assert "\x1b" not in outcome.err
    assert "7 tok · " in outcome.err
    assert len(outcome.err.splitlines()) <= 6
    quiet = run_cli([*options, "-q", "-p", "def f(x):\n    return"], command="chat")
    assert (quiet.out, quiet.err) == (outcome.out, "")
    assert run_cli([*options, "-q", "-p", "-"], stdin="def f(x):\n    return\n", command="chat").out == outcome.out


def test_a_prompt_and_a_pipe_are_one_message(run_cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []

    def stop(*_: Any, **__: Any) -> None:
        raise EdgespecError("E_RUN", "no model is wanted here.", "None.")

    def first(*arguments: Any) -> None:
        asked.append(real(*arguments))

    real = chat_command._first_message
    monkeypatch.setattr(chat_command, "_first_message", first)
    monkeypatch.setattr(chat_command, "import_engine", stop)
    said = [
        run_cli([*options, "-n", "2"], stdin=stdin, command="chat").err
        for options, stdin in [
            (["-p", "Review this."], "- a\n+ b\n"),
            (["-p", "Review this.", "-st"], "\ttab first\n\n"),
            (["-p", "Review this."], ""),
            (["-p", "Review this."], " \n\n"),
            (["-p", "-"], "- a\n"),
            (["-p", " "], "- a\n"),
        ]
    ]
    assert asked == [
        "Review this.\n\n- a\n+ b", "Review this.\n\n\ttab first\n", "Review this.", "Review this.", "- a", "- a"
    ]  # fmt: skip
    assert "the message is -p and 2 lines of stdin" in said[0]
    assert not any("of stdin" in text for text in said[2:])


def test_a_stdin_that_is_closed_or_cannot_be_read_is_no_part_of_the_message(warm: list[str]) -> None:
    """As below cron, and below nohup, which gives a stdin that can only be written."""
    asks = ["-m", "edgespec", "chat", "-p", "def f(", "-n", "2", "-md", "none", "--policy", "none"]
    for python, line in (([sys.executable], 'exec "$@" <&-'), (warm, 'exec "$@" 0>/dev/null')):
        command = ["sh", "-c", line, "sh", *python, *asks]
        found = subprocess.run(command, capture_output=True, cwd=ROOT, timeout=90, check=False)
        assert (found.returncode, b"Error" in found.stderr) == (0, False), found.stderr


def test_a_pipe_that_does_not_end_is_waited_for_aloud(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    console = cast("Console", SimpleNamespace(say=said.append))
    monkeypatch.setattr(chat_command, "PATIENCE_S", 0.01)
    monkeypatch.setattr(chat_command, "read_text", lambda *_, **__: time.sleep(0.3) or "late")
    assert chat_command._piped(console) == "late"
    assert said == [chat_command.WAITING, "the message is -p and 1 line of stdin"]


@pytest.mark.parametrize(
    ("options", "stdin", "code", "said"),
    [
        ([], "", 2, "no message"),
        (["-p", " "], " ", 2, "no message"),
        (["-md", "draft"], "x", 2, "draft"),
        (["--temp", "-1"], "x", 2, "--temp"),
        (["-n", "0"], "x", 2, "not a length"),
        (["--greedy", "--temp", "1"], "x", 2, "--greedy"),
        (["--system", "a", "--system-file", "b"], "x", 2, "one system prompt"),
        (["--color", "blue"], "x", 2, "blue"),
        (["--stop", "\udcff"], "x", 2, "--stop is not UTF-8"),
        (["-p", "\udcff"], "", 2, "-p is not UTF-8"),
        (["--system", "\udcff"], "x", 2, "--system is not UTF-8"),
        (["-c", "99999"], "x", 2, "4096"),
        (["-c", "16", "-n", "4"], "long " * 99, 2, "context holds 16"),
    ],
)
def test_what_cannot_be_is_refused(options: list[str], stdin: str, code: int, said: str, run_cli: RunCli) -> None:
    outcome = run_cli(options, stdin=stdin, command="chat")
    assert (outcome.code, outcome.out) == (code, "")
    assert said in outcome.err
    assert "Traceback" not in outcome.err


@pytest.mark.skipif(sys.platform == "win32", reason="a closed pipe has another name there")
def test_a_closed_pipe_ends_the_chat_quietly(warm: list[str]) -> None:
    reader, writer = os.pipe()
    chat = subprocess.Popen(
        [*warm, "-m", "edgespec", "chat", "-n", "400", "--temp", "0", "-q", "--policy", "none"],
        stdin=subprocess.PIPE, stdout=writer, stderr=subprocess.PIPE, cwd=ROOT,
    )  # fmt: skip
    os.close(writer)
    assert chat.stdin
    chat.stdin.write(b"def main(")
    chat.stdin.close()
    chat.stdin = None
    assert os.read(reader, 1)
    os.close(reader)
    _, complaint = chat.communicate(timeout=90)
    assert (chat.returncode, complaint) == (1, b"")


@pytest.mark.parametrize("becomes", [KeyboardInterrupt, ImportError, None])
def test_ctrl_c_while_models_are_loaded_leaves_with_130(
    becomes: type[BaseException] | None, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where an import within it took the interrupt for an error of its own, or swallowed it."""
    build = Engine.__init__

    def press(self: Engine, *arguments: Any, **options: Any) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            if becomes is not None:
                raise becomes from None
        build(self, *arguments, **options)

    monkeypatch.setattr(Engine, "__init__", press)
    outcome = run_cli(["--no-self-check"], stdin="x", command="chat")
    assert (outcome.code, outcome.out) == (130, "")
    assert "Error" not in outcome.err


class _Stopped(Exception):  # noqa: N818
    """The command got as far as talking."""


def test_every_setting_reaches_the_engine(run_cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    build = Engine.__init__

    def remember(self: Engine, setup: PairSetup, **options: Any) -> None:
        seen.update(options, tree=setup.tree, run_config=setup.run_config)
        build(self, setup, **options)

    def stop(self: Engine, **options: Any) -> None:
        seen.update(options)
        raise _Stopped

    monkeypatch.setattr(Engine, "__init__", remember)
    monkeypatch.setattr(Engine, "chat", stop)
    given = (
        "--system be --raw --temp 0.9 --top-k 11 --top-p 0.8 --min-p 0.03 --seed 99 --stop END --policy dyspec -t 1 "
        "--tree-size 33 --tree-depth 5 --max-cpu-mem 3GiB -ngl 1 -c 200 --device cpu --dtype bfloat16 --profile none"
    )
    run_cli([*given.split(), "--no-self-check"], stdin="x", command="chat")
    assert seen["tree"] == TreeSettings(policy="dyspec", size=33, depth=5)
    assert seen["run_config"] == RunConfig(
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        limits=MemoryLimits(max_cpu_bytes=3 << 30, max_resident_layers=1),
        context_tokens=200,
        prompt_tokens=200,
        threads=1,
    )
    assert seen["self_check"] is False
    assert seen["sampling"] == SamplingSettings(temperature=0.9, top_k=11, top_p=0.8, min_p=0.03)
    assert (seen["seed"], seen["stop"], seen["system"], seen["raw"]) == (99, ("END",), "be", True)
    names = {str(parameter.name) for parameter in command.params}
    assert {"prompt_text", "single_turn", "history", "stats", "color", "max_new_tokens"} <= names


def test_turns_commands_and_what_they_say(talk: Talk, tmp_path: Path) -> None:
    chat, out, err = talk("def main(", "import os", "/undo", "/stats", "/show model", "/show prompt", "/show memory")
    assert len(chat.conversation.messages) == 2
    assert out.count("\n") >= 2
    assert "took back: import os" in err
    assert "2 answers · 12 tok" in err
    assert "tok/pass" in err
    assert "GiB of" in err
    assert "def main(" in err
    _, _, err = talk("/set temp 0.5", "/set top_p=0.9 seed=4", "/set", "/set temprature 1", "/set top_p 7", chat=chat)
    assert "temperature: 0.0 → 0.5" in err
    assert "seed: - → 4" in err
    assert "Did you mean temperature?" in err
    assert "--top-p 7.0" in err
    sampling = chat.conversation.options["sampling"]
    assert sampling == SamplingSettings(temperature=0.5, top_p=0.9)
    assert "temperature: 0.5 → 0.9" in talk("/set temperature 0.9", chat=chat)[2]
    assert "temperature: 0.9 → 0.5" in talk("/set --temperature=0.5", chat=chat)[2]
    _, _, err = talk("/set top_k=3 top_p=9", chat=chat)
    assert chat.conversation.options["sampling"] == sampling  # all or nothing
    _, _, err = talk("/set repeat_penalty 1.2", "/set presence_penalty=1 frequency_penalty=-0.5",
                     "/set presence_penalty 3", chat=chat)  # fmt: skip
    assert "repetition_penalty: 1.0 → 1.2" in err
    assert "--presence-penalty 3.0 is not in [-2, 2]" in err
    penalties = {"repetition_penalty": 1.2, "presence_penalty": 1.0, "frequency_penalty": -0.5}
    assert chat.conversation.options["sampling"] == replace(sampling, **penalties)
    _, _, err = talk("/clear", "/new", "/?", "/? keys", "/help regen", "/help nothing", chat=chat)
    assert "cleared 1 turn\n" in err
    assert "cleared 0 turns\n" in err
    assert all(f"/{name}" in err for name in ACTIONS)
    assert "Ctrl-X Ctrl-E" in err
    assert "there is no command /nothing" in err


def test_an_answer_that_was_cut_goes_on(talk: Talk, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its bound, and by Ctrl-C, which cancels: what is shown and kept is the answer that nobody cut."""
    expected = engine.chat(sampling=GREEDY, max_new_tokens=18)
    expected.send("def main(")
    text = expected.messages[-1].content
    chat, out, err = talk("/continue", "def main(", "/go", "/continue")
    assert err.count("there is no answer to go on with") == 1
    assert chat.conversation.messages == expected.messages
    assert out.replace("\n", "") == text.replace("\n", "")
    assert "stopped: length" in err
    chat = new_chat(engine)
    chat.conversation.options["max_new_tokens"] = 18
    show = Screen.answer

    def stopping(screen: Screen, piece: str) -> None:
        show(screen, piece)
        engine.cancel()

    monkeypatch.setattr(Screen, "answer", stopping)
    chat, first, err = talk("def main(", chat=chat)
    monkeypatch.undo()
    assert chat.conversation.messages[-1].is_interrupted
    assert "stopped: interrupted" in err
    chat.conversation.options["max_new_tokens"] = 18 - len(chat.conversation.messages[-1].token_ids)
    chat, rest, _ = talk("/continue", chat=chat)
    assert chat.conversation.messages == expected.messages
    assert (first + rest).replace("\n", "") == text.replace("\n", "")
    _, _, err = talk("/undo", "/continue", "/help continue", chat=chat)
    assert "there is no answer to go on with" in err
    assert "go on with an answer that was cut" in err


def test_speculation_changes_live_and_the_text_does_not(talk: Talk) -> None:
    chat, out, err = talk(
        "def main(", "/spec off", "/regen", "/spec chain", "/r", "/tree 2", "/retry", "/spec tree", "/tree 5", "/regen",
        "/tree 9", "/tree many", "/spec fast", "/set spec=off", "/set spec=on", "/tree auto", "/stats",
    )  # fmt: skip
    texts = {turn.result.text for turn in chat.turns}
    assert len(texts) == 1
    assert [turn.spec for turn in chat.turns] == ["tree", "off", "chain", "chain", "tree"]
    assert max(step.num_drafted for step in chat.turns[3].result.steps) == 2
    assert 2 < max(step.num_drafted for step in chat.turns[4].result.steps) <= 5
    assert "room for 8" in err
    assert "'many' is not a whole number" in err
    assert "'fast' is no way to speculate" in err
    assert "spec: off → tree" in err
    assert "against /spec off: tree" in err
    assert chat.engine.tree == chat.own_tree
    assert next(iter(texts)) in out


def test_a_system_message_that_the_template_refuses_goes_before_the_first_message_and_that_is_said(
    talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat, _, _ = talk("/show settings")
    template = "{% for m in messages %}{{ raise_exception('no') if m.role == 'system' else m.content }}{% endfor %}"
    monkeypatch.setattr(chat.engine.pair.tokenizer, "chat_template", template)
    chat.conversation.is_raw = False
    assert "before the first user's message" in talk("/system Be brief.", chat=chat)[2]
    assert chat.engine.pair.tokenizer.decode(chat.conversation.first_ids("x")) == "Be brief.\n\nx"


def test_thinking_is_switched_where_the_template_can(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    chat, _, err = talk("/set think off")
    assert "there is no chat template: thinking cannot be switched" in err
    tokenizer = chat.engine.pair.tokenizer
    monkeypatch.setattr(tokenizer, "chat_template", "{% for message in messages %}{{ message.content }}{% endfor %}")
    chat.conversation.is_raw = False
    assert "reads no enable_thinking" in talk("/set think off", chat=chat)[2]
    template = f"{tokenizer.chat_template}{{% if enable_thinking is false %}}quick{{% endif %}}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    _, _, err = talk("/set think=off", "/set think maybe", chat=chat)
    assert "think: - → off" in err
    assert "is not on, off or auto" in err
    prompt = chat.conversation.prompt_ids((Message(role="user", content="x"),))
    assert tokenizer.decode(prompt) == "xquick"
    _, _, err = talk("/set think=on top_p=7", chat=chat)  # all or nothing
    assert chat.conversation.template_values == {"enable_thinking": False}
    talk("/set think auto", chat=chat)
    assert chat.conversation.template_values == {}


def test_what_is_unknown_is_named_and_never_sent(talk: Talk) -> None:
    chat, out, err = talk("/clearfoo", "/Undo", "/EXITS", "   ", "", "/", "/read", "/load", "/show what")
    assert (chat.turns, out) == ([], "")
    assert "Unknown command /clearfoo" in err
    assert "nothing was said" in err
    assert "Did you mean /exit?" in err
    assert "there is no 'what' to show" in err
    chat, _, _ = talk("//not a command", chat=chat)
    assert chat.conversation.messages[0].content == "/not a command"


def test_interrupts_at_the_prompt_and_in_commands(talk: Talk) -> None:
    chat, _, err = talk(
        KeyboardInterrupt(), "/system", KeyboardInterrupt(), "/system", "be", "/system", "be", "/show system"
    )
    assert HINT in err
    assert "left as it was" in err
    assert chat.conversation.system == "be"
    assert "removed" in talk("/system", " ", chat=chat)[2]
    chat, _, _ = talk("def main(", "/edit", "def other(", chat=chat)
    assert isinstance(chat.read_message, Lines)
    assert chat.read_message.defaults[2] == "def main("
    assert [message.content for message in chat.conversation.messages[::2]] == ["def other("]
    assert "nothing was said" in talk("/clear", "/edit", chat=chat)[2]


def test_the_oldest_turns_are_dropped_when_somebody_asks(talk: Talk) -> None:
    """Half of the context is free then; the system's message and the last turn stay."""
    texts = [f"value_{number} = compute(value)  # {'and so on ' * 4}" for number in range(8)]
    chat, _, err = talk("/system Be brief.", *texts)
    assert "with /compact, or all with /clear" in err  # offered, and not done
    before = chat.conversation.messages
    kept = [message.content for message in before if message.role == "user"]
    assert "value_0 = compute(value)" in before[0].content
    _, _, err = talk("/compact", chat=chat)
    left = [message.content for message in chat.conversation.messages if message.role == "user"]
    assert 0 < len(left) < len(kept)
    assert left == kept[-len(left) :]
    assert chat.conversation.messages == before[-2 * len(left) :]
    assert chat.conversation.system == "Be brief."
    assert 2 * chat.conversation.num_tokens <= 160
    assert re.findall("^dropped: (value_.)", err, re.MULTILINE) == [text[:7] for text in kept[: -len(left)]]
    assert f"dropped the oldest {len(kept) - len(left)} turns; " in err
    assert "nothing was answered" not in talk("one more", chat=chat)[2]
    chat, _, err = talk("only one", "/compact")
    assert "no turn before the last" in err
    assert "Try: Forget all with /clear" in err
    assert chat.conversation.num_turns == 1


def test_a_file_goes_before_the_next_message(talk: Talk, tmp_path: Path) -> None:
    file, large, binary = tmp_path / "a.py", tmp_path / "large.txt", tmp_path / "b"
    file.write_text("x = 1\n")
    large.write_text("word " * 500)
    binary.write_bytes(b"\xff\xfd")
    chat, _, err = talk(f"/read {large}", f"/read {binary}", f"/read {tmp_path}", f"/file {file}", "/read", "y = 2")
    assert "the context holds 160" in err
    assert "not UTF-8" in err
    assert "cannot read" in err
    assert "% of the context" in err
    assert f"attached: {file}" in err
    assert chat.conversation.messages[0].content == "x = 1\ny = 2"
    chat, _, _ = talk(f"/read {file}", "", chat=chat)
    assert chat.conversation.messages[2].content == "x = 1"
    assert chat.attachments == []


def test_a_file_is_read_as_prompts_are_and_a_dash_is_no_stdin(
    talk: Talk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("-").write_bytes("ü = 1".encode("utf-16"))
    Path("packed.gz").write_bytes(gzip.compress(b"y = 2"))
    chat, _, _ = talk("/read -", "/read packed.gz")
    assert [attachment.text for attachment in chat.attachments] == ["ü = 1", "y = 2"]


def test_a_full_context_is_refused_and_nothing_is_lost(talk: Talk, tmp_path: Path) -> None:
    chat, _, err = talk("/set n=-1", "def main(", "and more", "/undo", "/set n=6", "again")
    assert "stopped: context" in err
    assert "the context is full: /clear drops it; " in err
    assert "the context holds 160" in err
    assert len(chat.conversation.messages) == 2
    saved = tmp_path / "long.json"
    saved.write_text(
        json.dumps({"schema": "edgespec.session/1", "messages": [{"role": "user", "content": "x " * 400}]})
    )
    before = chat.conversation.messages
    assert "the session has" in talk(f"/load {saved}", chat=chat)[2]
    assert chat.conversation.messages == before


def test_sessions_are_saved_and_loaded_with_their_settings(
    talk: Talk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    path = tmp_path / "s.json"
    chat, _, err = talk("def main(", "/set top_p=0.5 tree_size=3 seed=8", f"/save {path}", f"/save {path}", "/save")
    assert f"'{path}' exists.\nTry: Choose another name, or overwrite it: /save! FILE." in err
    (own,) = (tmp_path / "sessions").iterdir()
    document = json.loads(path.read_text())
    assert document["settings"]["top_p"] == 0.5
    document["settings"] |= {"unknown": 1, "temperature": -3, "tree_depth": None}
    document["model"] = "elsewhere"
    path.write_text(json.dumps(document))
    other, _, err = talk(f"/load {path}", "/show")
    assert other.conversation.messages == chat.conversation.messages
    assert other.conversation.options["sampling"] == SamplingSettings(top_p=0.5)
    assert (other.conversation.options["seed"], other.engine.tree.size) == (8, 3)
    assert "not applied: unknown" in err
    assert "not applied: temperature -3" in err
    assert "saved with elsewhere" in err
    assert "loaded 1 turn" in talk(f"/load {own.stem}")[2]
    talk(f"/save! {path}", f"/save {tmp_path / 't.md'}", chat=chat)
    assert json.loads(path.read_text())["model"] == str(chat.engine.pair.target.folder)
    assert (tmp_path / "t.md").read_text().startswith("# ")


def test_every_setting_can_be_saved_and_set_again(talk: Talk) -> None:
    chat, _, _ = talk()
    for name, setting in SETTINGS.items():
        assert setting.hint
        value = setting.get(chat)
        default = "random" if name == "seed" else "auto"
        handle_command(chat, "set", f"{name} {default if value is None else value}".replace("True", "on"))


def test_control_characters_in_answers_are_shown_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    with visible_streams():
        screen = Screen(Console(quiet=False, verbose=False), color="never")
        screen.begin_answer()
        screen.answer("a\x1b]0;evil\x07\tb\n")
        screen.say("\x1b[2J")
    written = capsys.readouterr()
    assert written.out == "a\\x1b]0;evil\\x07\tb\n"
    assert "\x1b" not in written.err


def test_colour_follows_the_flag_and_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(quiet=False, verbose=False)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert Screen(console, color="auto").has_color
    assert not Screen(console, color="never").has_color
    monkeypatch.setenv("NO_COLOR", "1")
    assert not Screen(console, color="auto").has_color
    assert Screen(console, color="always").has_color
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not Screen(console, color="auto").has_color


def test_prefill_is_shown_once_it_takes_a_while(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    clock = [0.0]
    monkeypatch.setattr("edgespec.cli.prefill_line.time.monotonic", lambda: clock[0])
    screen = Screen(Console(quiet=False, verbose=False), color="never")
    screen.begin_answer()
    screen.prefill(10, 100)
    clock[0] = 2.0
    screen.prefill(50, 100)
    screen.prefill(51, 100)
    screen.answer("text")
    written = capsys.readouterr()
    assert written.err.count("prefill") == 1
    assert "prefill 50/100 tok 50% eta 2s" in written.err
    assert written.err.endswith("\r" + " " * len("prefill 50/100 tok 50% eta 2s") + "\r")
    # Where a bar has a place for it, it is drawn there; and taken away again.
    drawn: list[str] = []
    line = PrefillLine(Console(quiet=False, verbose=False), draw=drawn.append)
    clock[0] = 4.0
    line.update(2, 8)
    line.end()
    line.end()
    assert drawn == ["prefill 2/8 tok 25% eta 6s", ""]
    assert capsys.readouterr().err == ""


def result(**changes: Any) -> GenerationResult:
    step = StepResult(tokens=(1,), finish=None, num_drafted=0, is_prefill=True, num_cached=1228, grow_s=0, target_s=0.5,
                      rest_s=0)  # fmt: skip
    whole = {
        "text": "", "token_ids": tuple(range(212)), "finish_reason": "stop", "prompt_tokens": 1240, "seed": 0,
        "sampling": GREEDY, "steps": (step,), "total_s": 30.0,
    }  # fmt: skip
    return GenerationResult(**{**whole, **changes})


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
def test_the_footer_fits_its_line(width: int) -> None:
    line = footer(result(), max_context=8192, gpu="gpu 1.0/2.0 GiB", trees=None, width=width)
    assert len(line) <= width
    assert line.startswith("212 tok")
    whole = "212 tok · 7.2 tok/s · ctx 1452/8192 · prefill 12 tok (1228 kept) · first 0.5s · gpu 1.0/2.0 GiB"
    assert line == whole if width == 200 else whole.startswith(line)


@given(typed=st.text(max_size=30))
def test_whatever_is_typed_is_a_message_or_a_command(typed: str) -> None:
    line = parse(typed)
    assert (line.command is None) == (not typed.startswith("/") or typed.startswith("//"))
    if not wants_more(typed):
        assert len(without_quotes(typed)) <= len(typed)


def test_an_error_while_answering_keeps_what_was_said(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    class OutOfMemoryError(Exception):
        pass

    stream = Conversation._chunks

    def fail(self: Conversation, *arguments: Any, **options: Any) -> Iterator[TextChunk]:
        chunks = stream(self, *arguments, **options)
        yield next(chunks)
        chunks.close()
        raise OutOfMemoryError

    monkeypatch.setattr(Conversation, "_chunks", fail)
    chat, _, err = talk("def main(")
    assert "memory ran out" in err
    assert chat.conversation.messages[1].is_interrupted
    monkeypatch.undo()
    chat, _, err = talk("go on", chat=chat)
    assert chat.conversation.num_turns == 2


def test_an_answer_that_was_abandoned_at_once_was_never_asked(talk: Talk) -> None:
    chat, _, _ = talk("def main(")
    with pytest.raises(EdgespecError, match="context"):
        answer(chat, lambda on_prefill: chat.conversation.stream("x " * 300, on_prefill=on_prefill))
    assert chat.conversation.num_turns == 1
