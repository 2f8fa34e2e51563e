"""What others wrote is shown and never obeyed: names, errors, records, a model's own text."""

import json
import logging
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.chat.chat_template import Message
from edgespec.chat.conversation import Conversation
from edgespec.chat.session_file import SavedSession
from edgespec.cli import console, run
from edgespec.cli.chat import line_editor
from edgespec.cli.chat.screen import Screen
from edgespec.cli.console import Console
from edgespec.cli.profile.report import write_report
from edgespec.cli.standard_streams import visible, visible_streams
from edgespec.user_paths import CONTROL, json_text
from profiles.files import write_profile
from tests.cli.conftest import RunCli
from tests.profiles.examples import example_profile

# A window's title, erasing, a colour, the same as C1, what is written over, the order of letters
HOSTILE = "\x1b]0;owned\x07\x1b[2J\x1b[44m\x9b2J\x9d0;x\x9c\x08\rhidden\x7f\u202e"
WRITTEN_OUT = r"\x1b]0;owned\x07\x1b[2J\x1b[44m\x9b2J\x9d0;x\x9c\x08\rhidden\x7f\u202e"
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
# What we send a terminal ourselves: colours, the cursor, a line that is written over
OWN = re.compile(r"\x1b\[(?!44m)[\d;]*m|\x1b\[\?25[lh]|\x1b\[\d*[AK]|\r(?!hidden)")

Prepare = Callable[[Path, Path], list[str]]  # a copy of the target, the folder to work in -> command and arguments
SOURCES: dict[str, Prepare] = {}


def source(prepare: Prepare) -> Prepare:
    SOURCES[prepare.__name__] = prepare
    return prepare


def changed(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def hostile_profile() -> Any:
    profile = example_profile()
    return replace(profile, pair=replace(profile.pair, target=HOSTILE, draft=HOSTILE))


@source
def row_id(target: Path, folder: Path) -> list[str]:
    rows = [{"id": f"{HOSTILE}{number}", "prompt": "x" * length} for number, length in enumerate((300, 3))]
    (folder / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["generate", "p.jsonl", "-m", str(target), "-n", "2", "--temp", "0", "--log-file", "run.log"]


@source
def model_type(target: Path, _: Path) -> list[str]:
    changed(target / "config.json", model_type=HOSTILE)
    return ["generate", "-p", "x", "-m", str(target)]


@source
def shard_name(target: Path, _: Path) -> list[str]:
    path = target / "model.safetensors.index.json"
    names = json.loads(path.read_text())["weight_map"]
    changed(path, weight_map=dict.fromkeys(names, f"{HOSTILE}.safetensors"))
    return ["generate", "-p", "x", "-m", str(target)]


@source
def tensor_name(target: Path, _: Path) -> list[str]:
    path = target / "model.safetensors.index.json"
    shard = target / next(iter(json.loads(path.read_text())["weight_map"].values()))
    header = json.dumps({HOSTILE: {"dtype": "F32", "shape": [2], "data_offsets": [0, 5]}}).encode()
    shard.write_bytes(len(header).to_bytes(8, "little") + header + b"12345")
    return ["generate", "-p", "x", "-m", str(target)]


@source
def template_error(target: Path, folder: Path) -> list[str]:
    changed(target / "tokenizer_config.json", chat_template=f"{{{{ raise_exception('{HOSTILE}') }}}}")
    (folder / "p.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "x"}]}))
    return ["generate", "p.jsonl", "-m", str(target)]


@source
def earlier_record(target: Path, folder: Path) -> list[str]:
    record = {
        "id": HOSTILE,
        "config_hash": HOSTILE,
        "error": None,
        "finish_reason": HOSTILE,
        "config": {"seed": 1, "target": HOSTILE},
    }
    (folder / "out.jsonl").write_text(json.dumps(record, ensure_ascii=False) + "\n")
    (folder / "p.jsonl").write_text(json.dumps({"id": HOSTILE, "prompt": "x"}) + "\n")
    return ["generate", "p.jsonl", "-m", str(target), "-o", "out.jsonl", "--resume"]


@source
def profile_list(_: Path, folder: Path) -> list[str]:
    (folder / "home/profiles").mkdir(parents=True)
    (folder / f"home/profiles/{HOSTILE}.toml").write_text("{}")
    write_profile(hostile_profile(), folder / "home/profiles/other.toml")
    return ["profile", "--list"]


@source
def configured_key(_: Path, folder: Path) -> list[str]:
    (folder / "c.toml").write_text(f"[defaults]\n{json.dumps(HOSTILE)} = 1\n".replace("\x7f", "\\u007f"))
    return ["--config", "c.toml", "generate", "-p", "x"]


@source
def configured_file(_: Path, folder: Path) -> list[str]:
    path = folder / f"{HOSTILE}.toml"
    path.write_text("[defaults]\nseed = 3\n")
    return ["config", "show", "--origin", "--config", str(path)]


@source
def kept_file(target: Path, folder: Path) -> list[str]:
    path = folder / f"{HOSTILE}.cache"
    notes = folder / "home/prompts"
    notes.mkdir(parents=True)
    assert run(["generate", "-p", "x" * 60, "-m", str(target), "-n", "1", "-q", "--prompt-cache", str(path)]) == 0
    return ["cache", "list"]


@source
def file_to_remove(target: Path, folder: Path) -> list[str]:
    kept_file(target, folder)
    return ["cache", "clear", "--yes"]


@source
def models(target: Path, folder: Path) -> list[str]:
    changed(target / "config.json", model_type=HOSTILE, torch_dtype=HOSTILE, dtype=HOSTILE)
    target.rename(folder / HOSTILE)
    return ["models", str(folder)]


SOURCES |= {
    "rows_shown_as_text": lambda target, folder: [*row_id(target, folder), "--format", "text"],
    "prompt_file": lambda target, _: ["generate", f"{HOSTILE}.txt", "-m", str(target), "--log-file", "run.log"],
    "trace": lambda _, __: ["generate", f"{HOSTILE}.txt", "-vv"],
    "model_name": lambda _, __: ["generate", "-p", "x", "-m", HOSTILE],
    "model_folder": lambda target, folder: ["generate", "-p", "x", "-n", "1", "-v", "--log-file", "run.log", "-m",
                                            str(target.rename(folder / HOSTILE))],
    "profile_name": lambda target, _: ["generate", "-p", "x", "-m", str(target), "-md", str(target), "--profile",
                                       HOSTILE],
    "command_name": lambda _, __: [HOSTILE],
    "option_value": lambda _, __: ["generate", "-p", "x", "-n", HOSTILE],
}  # fmt: skip


@pytest.fixture
def place(pair_folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    folder = tmp_path / "place"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("EDGESPEC_HOME", str(folder / "home"))
    monkeypatch.setattr(console, "QUIET_INTERVAL_S", 0.0)
    return Path(shutil.copytree(pair_folders[0], tmp_path / "target")), folder


@pytest.mark.parametrize("is_terminal", [True, False], ids=["terminal", "pipe"])
@pytest.mark.parametrize("name", SOURCES)
def test_what_others_wrote_is_shown_and_never_obeyed(
    name: str,
    is_terminal: bool,
    place: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = SOURCES[name](*place)
    capsys.readouterr()
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: is_terminal)
    run(arguments)
    written = capsys.readouterr()
    log = place[1] / "run.log"
    channels = {"stdout": written.out, "stderr": written.err, "log": log.read_text() if log.exists() else ""}
    for channel, text in channels.items():
        assert not obeyed(text, is_terminal=is_terminal and channel != "log"), (channel, text)
    assert any("owned" in text for text in channels.values()), channels


def obeyed(text: str, *, is_terminal: bool) -> list[str]:
    """What a terminal would obey of others' texts."""
    return OBEYED.findall(OWN.sub("", text) if is_terminal else text)


def test_a_report_with_names_of_others_is_drawn_in_our_own_colours_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with visible_streams():
        write_report(hostile_profile())
    out = capsys.readouterr().out
    assert WRITTEN_OUT in out
    assert "\x1b[1m" in out  # the chosen row is bold
    assert not obeyed(out, is_terminal=True)


@pytest.mark.parametrize("is_terminal", [True, False], ids=["terminal", "pipe"])
def test_a_models_own_text_is_shown_on_a_terminal_and_is_data_elsewhere(
    is_terminal: bool, place: tuple[Path, Path], run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    files = {"g.lark": f"start: {json.dumps(HOSTILE)}\n", "p.txt": "x", "two.txt": "x\ny\n"}
    options = ["-m", str(place[0]), "-n", "90", "--temp", "0", "--grammar", "g.lark", "-q"]
    expected = WRITTEN_OUT if is_terminal else HOSTILE
    assert run_cli(["p.txt", *options], files=files).out == f"{expected}\n"
    assert run_cli(["two.txt", "--lines", "--format", "text", *options], files=files).out == f"{expected}\n" * 2
    record = run_cli(["p.txt", *options, "--format", "jsonl"], files=files).out
    assert not CONTROL.search(record)
    assert json.loads(record)["text"] == HOSTILE
    run_cli(["p.txt", *options, "-o", "out.txt", "--format", "text"], files=files)
    assert Path("out.txt").read_bytes().decode() == f"{HOSTILE}\n\n"


def test_a_chat_shows_what_it_loads_lists_and_is_answered(
    place: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    messages = (Message(role="user", content=HOSTILE), Message(role="assistant", content=HOSTILE))
    session = SavedSession(model=HOSTILE, system=HOSTILE, settings={HOSTILE: 1, "temperature": HOSTILE},
                           messages=messages).document()  # fmt: skip
    assert not CONTROL.search(session)
    Path("s.json").write_text(session)
    Path(f"{HOSTILE}.txt").write_text("x")
    Path(f"{HOSTILE}.json").write_text(json.dumps({"schema": HOSTILE}))
    typed = ["/load s.json", "/show system", "/show prompt", "/show model", "/undo", f"/{HOSTILE}", f"/show {HOSTILE}",
             f"/set stop={HOSTILE}", f"/set {HOSTILE}=1", f"/read {HOSTILE}.txt", "/read", f"/load {HOSTILE}.json",
             f"/load {HOSTILE}", f"/save {HOSTILE}.json", "a question"]  # fmt: skip

    def stream(self: Conversation, text: str, **_: Any) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(text=HOSTILE)

    monkeypatch.setattr(Conversation, "stream", stream)
    monkeypatch.setattr(line_editor, "open_reader", lambda **_: (Typed(typed), f"no history: {HOSTILE}"))
    for file in (sys.stdin, sys.stdout, sys.stderr):
        monkeypatch.setattr(file, "isatty", lambda: True, raising=False)
    run(["chat", "-m", str(place[0]), "-c", "200"])
    written = capsys.readouterr()
    assert written.out == f"{WRITTEN_OUT}\n"
    assert not obeyed(written.err, is_terminal=True)
    assert written.err.count("owned") >= len(typed)


def test_our_own_colours_stay_and_those_of_others_do_not(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with visible_streams():
        screen = Screen(Console(quiet=False, verbose=False), color="always")
        screen.note("\x1b[44mnote\x1b[0m", warning=HOSTILE)
        screen.say("\x1b[2msaid")
    own = f"\x1b[2m\\x1b[44mnote\\x1b[0m\x1b[0m · \x1b[33m{WRITTEN_OUT}\x1b[0m\n"
    assert capsys.readouterr().err == f"{own}\\x1b[2msaid\n"
    assert caplog.messages[0] == f"\x1b[44mnote\x1b[0m · {HOSTILE}"  # without our colours; the file writes it out


class Typed:
    """Types lines."""

    def __init__(self, lines: Sequence[str]) -> None:
        self._lines = iter(lines)

    def __call__(self, prompt: str, default: str) -> str:
        for line in self._lines:
            return line
        raise EOFError


def test_text_of_all_languages_stays_as_it_is() -> None:
    """Joiners of emoji, of Persian and of Hindi, blanks without a break, a soft hyphen, lines of Windows'."""
    text = "👩‍👩‍👧 می‌خواهم क्‍ष a\xa0b\u202fc\u3000d\u00ade ✌️ \ue000 \u0378 \u200f\u200e\ufeff 🏴󠁧󠁢󠁥󠁮󠁧󠁿\r\nnext\tline\n"
    assert visible(text) == text
    assert json_text(text) == json.dumps(text, ensure_ascii=False)


def test_what_is_written_out_means_the_same_in_json() -> None:
    everything = " ".join(map(chr, [*range(0x300), *range(0x2000, 0x2100), *range(0xD800, 0xE000, 64), 0x1F469]))
    assert json.loads(json_text({everything: [everything]})) == {everything: [everything]}
    assert visible(json_text(everything)) == json_text(everything)
    assert not obeyed(visible(everything), is_terminal=False)
