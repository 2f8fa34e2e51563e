"""--ordered: records are in the prompts' order whenever somebody looks, and none that is finished is lost."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from edgespec.cli.generate.output_file import OutputFile
from edgespec.cli.generate.record_output import RecordOutput
from edgespec.cli.generate.resume import keep_finished, read_results
from edgespec.cli.options.files import waiting_path
from edgespec.text.handle import TextHandle
from edgespec.tuning.step import StepResult
from tests.cli.conftest import RunCli, jsonl, written

ROOT = Path(__file__).parents[3]
# Without a tree all texts gain one token a pass, and so it is known when each ends: n12 is the last
ROWS = [{"id": f"n{count}", "prompt": "def main(", "max_new_tokens": count} for count in (12, 2, 6, 4, 3)]
IDS = [str(row["id"]) for row in ROWS]


@pytest.fixture
def options(pair_folders: tuple[Path, Path]) -> list[str]:
    command = ["p.jsonl", "-m", str(pair_folders[0]), "--temp", "0", "--seed", "3", "--policy", "none", "-np", "5"]
    return [*command, "--ordered", "-o", "out.jsonl"]


def ids(path: str | Path) -> list[str]:
    return [record["id"] for record in written(path)] if Path(path).exists() else []


def texts(path: str) -> dict[str, list[int]]:
    return {record["id"]: record["token_ids"] for record in written(path)}


def press_when(monkeypatch: pytest.MonkeyPatch, name: str) -> list[str]:
    """Ctrl-C in the pass in which this text ends; the names of all texts that gain tokens, as they do."""
    take, steps = TextHandle.take, list[str]()

    def press(self: TextHandle, step: StepResult) -> None:
        take(self, step)
        steps.append(self.request.name)
        if self.request.name == name and self.is_done:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(TextHandle, "take", press)
    return steps


@pytest.mark.parametrize("format_name", ["jsonl", "specbench", "openai-batch"])
def test_what_waited_when_ctrl_c_was_pressed_is_not_run_again(
    format_name: str, run_cli: RunCli, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [*options, "--format", format_name]
    assert run_cli([*command[:-4], "-o", "whole", *command[-2:]], files=jsonl(ROWS)).code == 0
    whole = Path("whole").read_text().splitlines()
    with monkeypatch.context() as patch:
        press_when(patch, "n6")
        outcome = run_cli(command, files=jsonl(ROWS))
    assert outcome.code == 130
    assert not Path("out.jsonl").exists()  # the first is not finished, and nothing goes before it
    assert (
        "stopped with 0 of 5 records written, 4 more wait for those before them, in 'out.jsonl.waiting'" in outcome.err
    )
    assert "has 4 of 5 results" in run_cli(command, files=jsonl(ROWS)).err
    with monkeypatch.context() as patch:
        steps = press_when(patch, "none")
        assert run_cli([*command, "--resume"], files=jsonl(ROWS)).code == 0
    assert set(steps) == {"n12"}
    found = Path("out.jsonl").read_text().splitlines()
    assert [answers(line) for line in found] == [answers(line) for line in whole]
    assert not Path("out.jsonl.waiting").exists()


def answers(line: str) -> Any:
    """What a record says of its prompt and its text, in any format."""
    found = json.loads(line)
    if "choices" in found:
        return found["question_id"], found["choices"][0]["turns"]
    return (
        (found["custom_id"], found["response"]["body"]["choices"])
        if "response" in found
        else (found["id"], found["text"])
    )


def test_without_ordered_what_waited_goes_before_what_is_still_to_run(
    run_cli: RunCli, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        press_when(patch, "n6")
        assert run_cli(options, files=jsonl(ROWS)).code == 130
    command = [option for option in options if option != "--ordered"]
    assert run_cli([*command, "--resume"], files=jsonl(ROWS)).code == 0
    assert sorted(ids("out.jsonl")) == sorted(IDS)
    assert ids("out.jsonl")[-1] == "n12"
    assert not Path("out.jsonl.waiting").exists()


def test_a_run_that_begins_anew_takes_up_nothing(
    run_cli: RunCli, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for order in ([], ["--ordered"]):
        with monkeypatch.context() as patch:
            press_when(patch, "n6")
            assert run_cli([*options, "--overwrite"], files=jsonl(ROWS)).code == 130
        assert len(ids("out.jsonl.waiting")) == 4
        command = [option for option in options if option != "--ordered"]
        assert run_cli([*command, *order, "--overwrite", "--limit", "2"], files=jsonl(ROWS)).code == 0
        assert sorted(ids("out.jsonl")) == ["n12", "n2"]
        assert not Path("out.jsonl.waiting").exists()


def test_a_failed_row_that_runs_again_comes_to_its_place(run_cli: RunCli, options: list[str]) -> None:
    """So does any file whose records are in another order."""
    assert run_cli(options, files=jsonl(ROWS)).code == 0
    lines = Path("out.jsonl").read_text().splitlines(keepends=True)
    whole = texts("out.jsonl")
    failed = json.loads(lines[1]) | {"error": {"type": "E_MEMORY"}, "finish_reason": "error"}
    Path("out.jsonl").write_text("".join([lines[3], lines[0], json.dumps(failed) + "\n", lines[4], lines[2]]))
    assert run_cli([*options, "--resume"], files=jsonl(ROWS)).code == 0
    assert ids("out.jsonl") == IDS
    assert texts("out.jsonl") == whole


def test_on_stdout_it_is_said_that_what_waits_is_lost(
    run_cli: RunCli, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    press_when(monkeypatch, "n6")
    outcome = run_cli([*options[:-2], "--format", "jsonl"], files=jsonl(ROWS))
    assert (outcome.code, outcome.out) == (130, "")
    assert "4 more wait for those before them and are lost: -o FILE keeps them" in outcome.err


def test_records_that_are_written_wait_no_longer(capsys: pytest.CaptureFixture[str]) -> None:
    output = RecordOutput(None, "jsonl", ["a", "b", "c", "d"])
    for name in ("b", "d", "a"):
        output.write(name, f"{name}\n")
    assert capsys.readouterr().out == "a\nb\n"
    assert output.num_written == 2
    assert output.waiting_note().startswith(", 1 more wait")


@pytest.mark.parametrize("seed", range(20))
def test_a_kill_at_any_moment_loses_no_record(seed: int, tmp_path: Path) -> None:
    """Whatever was written of both files, the rest runs again, and all are in order at the end."""
    chance = random.Random(seed)
    names = [f"r{number}" for number in range(6)]
    path = tmp_path / "out.jsonl"
    ready: set[str] = set()
    while True:
        results = read_results(path, "jsonl")
        assert results.done == ready
        assert ids(path) == names[: len(ids(path))]
        to_run = [name for name in names if name not in ready]
        file = OutputFile(path)
        held = keep_finished(file, results, set(to_run), names)
        if not to_run:
            file.close()
            break
        waiting = OutputFile(waiting_path(path))
        order = [name for name in names if name in {*to_run, *held}]
        output = RecordOutput(file, "jsonl", order, waiting=waiting, held=held)
        chance.shuffle(to_run)
        for name in to_run[: chance.randint(1, len(to_run))]:
            output.write(name, record(name))
            ready.add(name)
        # Killed here: nothing is closed or tidied up.
        for opened in (file, waiting):
            os.close(opened._file.fileno())
            opened._file.close = lambda: None
    assert ids(path) == names
    assert not waiting_path(path).exists()


def record(name: str) -> str:
    return json.dumps({"id": name, "config_hash": "0", "error": None, "finish_reason": "stop"}) + "\n"


@pytest.mark.skipif(sys.platform == "win32", reason="no signal that cannot be caught")
def test_a_process_that_is_killed_keeps_what_waits(tmp_path: Path, run_cli: RunCli) -> None:
    rows = [{"id": "slow", "prompt": "def main(", "max_new_tokens": 150}]
    rows += [{"id": f"r{index}", "prompt": "import os", "max_new_tokens": 3} for index in range(6)]
    folder = tmp_path / "cwd"
    folder.mkdir()
    (folder / "p.jsonl").write_text(jsonl(rows)["p.jsonl"])
    options = ["p.jsonl", "-o", "out.jsonl", "--ordered", "--temp", "0", "-np", "7", "--policy", "none", "--seed", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "EDGESPEC_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "edgespec", "generate", *options]
    process = subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE)
    waiting = folder / "out.jsonl.waiting"
    while process.poll() is None and (not waiting.exists() or waiting.read_bytes().count(b"\n") < 6):
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert process.returncode == -9
    assert ids(folder / "out.jsonl") == []
    assert sorted(ids(waiting)) == [f"r{index}" for index in range(6)]
    resumed = run_cli([*options, "--resume"])
    assert "6 of 7 prompts are done" in resumed.err
    assert resumed.code == 0, resumed.err
    assert ids(folder / "out.jsonl") == [str(row["id"]) for row in rows]
    assert not waiting.exists()
