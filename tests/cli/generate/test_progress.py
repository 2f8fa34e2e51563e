"""What a person sees of a run: a sign of life at once, prompts under way, and lines that fit the terminal."""

import json
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from edgespec.cli.console import counted
from edgespec.cli.generate import progress
from edgespec.cli.generate.progress import Tally, fitting
from edgespec.cli.generate.records import Totals, totals
from edgespec.cli.generate.requests import Request, RowTokens
from edgespec.cli.prompts.rows import parse_row
from edgespec.config import SamplingSettings
from edgespec.text.results import GenerationResult
from tests.cli.conftest import RunCli

ROOT = Path(__file__).parents[3]
SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def request(name: str, most: int) -> Request:
    return Request(
        row=parse_row({"id": name, "prompt": "x"}, name),
        ids=[1],
        sampling=SamplingSettings(),
        max_new_tokens=most,
        seed=0,
        stop=(),
        needs=RowTokens(new=most, prompt=1, context=most + 1),
    )


def result(num_tokens: int) -> GenerationResult:
    return GenerationResult(
        text="",
        token_ids=(0,) * num_tokens,
        finish_reason="stop",
        prompt_tokens=1,
        seed=0,
        sampling=SamplingSettings(),
        steps=(),
        total_s=1.0,
    )


def test_the_time_left_is_that_of_the_tokens_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of the prompts: a long one that is left takes as long as many short ones."""
    clock = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: clock[0])
    requests = [request("short", 10), request("long", 100), request("last", 90)]
    found = Tally(requests)
    assert found.progress(2, {"short": 0, "long": 0}) == ["0 of 3 prompts", "2 under way", "0 tokens"]
    clock[0] = 5.0
    # 20 tokens in 5 s, and 180 may come: before a text has ended, nobody knows whether they will.
    assert found.progress(2, {"short": 5, "long": 15}) == [
        "0 of 3 prompts", "at most 45 s left", "4.0 tok/s", "2 under way", "20 tokens",
    ]  # fmt: skip
    found.add(requests[0], totals([result(5)]), failed=False)
    # It had half of what it might: of the 175 that may come, half are expected.
    assert found.progress(1, {"long": 15})[1] == f"{175 / 2 / 4:.0f} s left"
    found.add(requests[2], Totals(), failed=True)  # says nothing of the others' lengths
    assert found.progress(1, {"long": 15})[1] == f"{85 / 2 / 4:.0f} s left"


def test_a_line_holds_whole_parts_and_says_how_many_are_left_out() -> None:
    names = ["one 1/9", "two 2/9", "three 3/9"]
    assert fitting(names, ", ", 80) == "one 1/9, two 2/9, three 3/9"
    assert fitting(names, ", ", 24, more="+{} more") == "one 1/9, two 2/9"[:7] + ", +2 more"
    assert fitting(names, ", ", 25, more="+{} more") == "one 1/9, two 2/9, +1 more"
    assert fitting(names, ", ", 16) == "one 1/9, two 2/9"
    assert fitting(names, ", ", 4) == "one "


def test_numbers_agree_with_their_nouns(run_cli: RunCli, pair_folders: tuple[Path, Path]) -> None:
    assert [counted(count, "pass") for count in (0, 1, 2, 1024)] == ["0 passes", "1 pass", "2 passes", "1,024 passes"]
    assert counted(1, "token") == "1 token"
    options = ["-m", str(pair_folders[0]), "--temp", "0", "-p", "def", "--format", "jsonl"]
    assert re.search(r"^1 prompt · 2 tokens · .* · 1 pass$", run_cli([*options, "-n", "2"]).err, re.MULTILINE)
    assert re.search(r"^1 prompt · 1 token · .* · 0 passes$", run_cli([*options, "-n", "1"]).err, re.MULTILINE)


def test_in_a_pipe_there_are_no_lines_to_draw_over(run_cli: RunCli, pair_folders: tuple[Path, Path]) -> None:
    options = ["p.jsonl", "-m", str(pair_folders[0]), "--temp", "0", "-n", "4", "-o", "out.jsonl", "--overwrite"]
    files = {"p.jsonl": '{"prompt": "def"}\n{"prompt": "import"}\n'}
    said = run_cli(options, files=files).err
    assert "\r" not in said
    assert "\x1b" not in said
    assert "loading" not in said
    assert "under way" not in said
    assert run_cli([*options, "-q"], files=files).err == ""


class Terminal:
    """A program in a terminal, with what it wrote and when."""

    def __init__(
        self,
        arguments: list[str],
        folder: Path,
        *,
        columns: int,
        ctrl_c_at: str = "",
        python: Sequence[str] = (sys.executable,),
    ) -> None:
        pexpect = pytest.importorskip("pexpect")
        started = time.perf_counter()
        # Its width is the terminal's own, whatever COLUMNS says here.
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        child = pexpect.spawn(
            python[0],
            [*python[1:], "-m", "edgespec", *arguments],
            cwd=str(folder),
            env={**environment, "PYTHONPATH": str(ROOT), "EDGESPEC_HOME": str(folder), "TERM": "xterm"},
            encoding="utf-8",
            timeout=120,
            dimensions=(30, columns),
        )
        self.pieces: list[tuple[float, str]] = []
        while True:
            try:
                self.pieces.append((0.0, child.read_nonblocking(4096, timeout=120)))
            except pexpect.EOF:
                break
            self.pieces[-1] = (time.perf_counter() - started, self.pieces[-1][1])
            if ctrl_c_at and ctrl_c_at in self.pieces[-1][1]:
                child.sendintr()
                ctrl_c_at = ""
        child.close()
        self.written = "".join(text for _, text in self.pieces)
        self.code = child.exitstatus

    @property
    def drawn(self) -> list[str]:
        """The lines that were drawn to be drawn over."""
        lines = re.split(r"\r\n|\r|\n|\x1b\[\d*[AK]|(?=loading target)", self.written)
        plain = [SEQUENCE.sub("", line) for line in lines]
        return [line for line in plain if re.search("of 12 prompts|MiB|loading|reading|/40|/900", line)]


def longest_redraw(written: str) -> int:
    """The most lines up that were taken at once."""
    return max(map(len, re.findall(r"(?:\x1b\[1A\x1b\[2K)+", written))) // len("\x1b[1A\x1b[2K")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """A file of twelve prompts, whose names look like markup."""
    rows: list[dict[str, Any]] = [{"id": f"a-name-[red]{number}", "prompt": "def main("} for number in range(12)]
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_terminal_shows_what_is_under_way(prompts: Path, tmp_path: Path, warm: list[str]) -> None:
    options = ["generate", prompts.name, "-o", "out.jsonl", "-n", "40", "--temp", "0", "-np", "5", "--policy", "none"]
    terminal = Terminal(options, tmp_path, columns=100, python=warm)
    assert terminal.code == 0, terminal.written
    drawn = terminal.drawn
    assert any(re.match(r"\d+ of 12 prompts · at most \d+ s left", line) for line in drawn)
    assert any(re.match(r"a-name-\[red\]\d+ \d+/40(, |$)", line) for line in drawn)
    assert any(re.search(r"left · \d+\.\d tok/s · 5 under way · \d+ tokens$", line) for line in drawn)
    assert max(map(len, drawn)) <= 100
    # Two lines, and a third while prompts are read: a wrapped one would take another step up.
    assert longest_redraw(terminal.written) <= 3
    # What was drawn is gone at the end: the last line is the summary.
    assert re.search(r"\x1b\[2K12 prompts · 480 tokens[^\x1b]*$", terminal.written)


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_no_line_is_too_long_and_ctrl_c_leaves_nothing_of_them(prompts: Path, tmp_path: Path) -> None:
    """Whoever draws lines over counts them: what Ctrl-C is answered with adds none, and goes with them."""
    options = ["generate", prompts.name, "-o", "out.jsonl", "-n", "900", "--ignore-eos", "--policy", "none", "-np", "5"]
    terminal = Terminal(options, tmp_path, columns=40, ctrl_c_at="9/900")
    assert terminal.code == 130, terminal.written
    drawn = terminal.drawn
    assert any("loading torch and transformers" in line for line in drawn)
    assert any(re.match(r"\d+ of 12 prompts · at most \d+ s left", line) for line in drawn)
    assert any(re.match(r"a-name-\[red\]\d+ \d+/900(, |$)", line) for line in drawn)
    assert max(map(len, drawn)) <= 40
    assert longest_redraw(terminal.written) <= 3
    notice, _, after = terminal.written.partition("stopping after this pass")[2].partition("\x1b[")
    assert "\n" not in notice
    assert len("stopping after this pass" + notice.rstrip("\r")) < 40
    assert "stopped with 0 of 12 records written" in after
    assert "under way" not in after.rpartition("\x1b[2K")[2]


def sees_a_sign_of_life(terminal: Terminal) -> bool:
    """Whether it says what is loaded long before that is done, and erases it."""
    said_s = next(passed_s for passed_s, text in terminal.pieces if "loading torch" in text)
    after_s = next(passed_s for passed_s, text in terminal.pieces if "layers resident" in text)
    return said_s < after_s / 2 and "loading torch and transformers\r \x20" in terminal.written


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_records_on_a_terminal_are_whole_lines_after_a_sign_of_life(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "words of a prompt " * 9}) + "\n")
    terminal = Terminal(["generate", "p.jsonl", "-n", "4", "--temp", "0", "--policy", "none"], tmp_path, columns=60)
    assert terminal.code == 0, terminal.written
    assert sees_a_sign_of_life(terminal)
    plain = SEQUENCE.sub("", terminal.written)
    (record,) = (json.loads(line) for line in re.split(r"[\r\n]+", plain) if line.startswith("{"))
    assert record["prompt"] == "words of a prompt " * 9


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_there_is_a_sign_of_life_before_an_estimate(tmp_path: Path) -> None:
    terminal = Terminal(["estimate", "--hardware", "rtx-4090"], tmp_path, columns=80)
    assert terminal.code == 0, terminal.written
    assert sees_a_sign_of_life(terminal)
