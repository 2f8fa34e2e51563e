"""--log-file: all messages with their times, and the details of -v; no progress, and no answers."""

import json
import re
import sys
from pathlib import Path

import pytest

from edgespec.cli import COMMANDS, cli, run
from edgespec.cli.config.groups import all_commands
from tests.cli.conftest import RunCli

STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"
LOADING = {"bench", "chat", "generate", "profile", "serve", "train acceptance", "train classifier", "train head",
           "train router", "train stop"}  # fmt: skip


@pytest.fixture
def options(pair_folders: tuple[Path, Path]) -> list[str]:
    return ["-m", str(pair_folders[0]), "-md", str(pair_folders[1]), "--temp", "0", "-n", "3", "--log-file", "run.log"]


def said(log: str, level: str = "INFO") -> list[str]:
    return re.findall(rf"^{STAMP} {level} (.*)$", log, re.MULTILINE)


def test_every_command_that_loads_models_has_it() -> None:
    import click

    assert COMMANDS
    commands = all_commands(click.Context(cli, info_name="edgespec"))
    assert {name for name, command in commands.items() if any(o.name == "log_file" for o in command.params)} == LOADING


def test_it_holds_what_is_said_and_the_details(
    run_cli: RunCli, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with -q; lines that only say how far a run is are left out."""
    monkeypatch.setattr("edgespec.cli.console.QUIET_INTERVAL_S", 0.0)
    files = {"p.jsonl": '{"prompt": "def"}\n{"id": "long", "prompt": "' + "x" * 300 + '"}\n{"prompt": "import"}\n'}
    outcome = run_cli(["p.jsonl", *options], files=files)
    log = Path("run.log").read_text()
    assert outcome.code == 3
    for line in outcome.err.splitlines():
        if not line.startswith(("Error: ", "Try: ")):
            is_progress = re.search(r"^\d of 3 prompts · |\d of \d+ MiB", line) is not None
            assert (line in said(log)) != is_progress, line
    assert re.search("^. of 3 prompts · ", outcome.err, re.MULTILINE)
    assert "memory plan:" in log
    assert "memory plan:" not in outcome.err
    (error,) = said(log, "ERROR")
    assert error.startswith("line 2: the prompt has 300 tokens")
    assert "Shorten it" in error
    assert re.match(r"edgespec \S+: edgespec ", said(log)[0])
    assert said(log)[-1] == "exit status 3"
    assert outcome.out
    assert not any(json.loads(line)["id"] in log.splitlines() for line in outcome.out.splitlines())

    quiet = run_cli(["p.jsonl", *options, "-q"], files=files)
    again = Path("run.log").read_text()
    assert quiet.err.count("\n") == 2  # the row's error
    assert again.startswith(log)  # appended
    assert len(said(again)) == 2 * len(said(log))


def test_an_error_that_ends_the_run_is_in_it(run_cli: RunCli, options: list[str]) -> None:
    """Also one that other options have, and its trace where it is nobody's fault but ours."""
    assert run_cli(["p.txt", "-m", "nowhere/at-all", *options[2:]], files={"p.txt": "x"}).code != 0
    log = Path("run.log").read_text()
    assert "nowhere/at-all" in said(log, "ERROR")[0]
    assert said(log)[-1].startswith("exit status ")
    assert run_cli(["-p", "x", *options, "--json-is-none"]).code == 2


def test_a_fault_of_ours_leaves_its_trace(run_cli: RunCli, options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise LookupError("a fault")

    monkeypatch.setattr("edgespec.cli.generate.command.prepare", fail)
    assert run_cli(["-p", "x", *options]).code == 1
    log = Path("run.log").read_text()
    assert "LookupError: a fault" in log
    assert "Traceback" in log


def test_colours_stay_out_of_it(run_cli: RunCli, options: list[str]) -> None:
    assert "\x1b[2m3 tok" in run_cli([*options, "--color", "always"], stdin="def", command="chat").err
    assert "\x1b" not in Path("run.log").read_text()
    assert any(line.startswith("3 tok · ") for line in said(Path("run.log").read_text()))


def test_it_is_never_written_into_a_file_of_another_kind(run_cli: RunCli, options: list[str]) -> None:
    files = {"run.log": '{"prompt": "my prompts"}\n'}
    assert "'run.log' exists and is no log" in run_cli(["run.log", *options], files=files).ended(2).err
    assert Path("run.log").read_text() == files["run.log"]
    refused = run_cli(["-p", "x", *options[:-1], "no/such/folder/run.log"]).ended(1)
    assert "the log 'no/such/folder/run.log' cannot be written (No such file or directory)" in refused.err
    Path("run.log").unlink()
    both = run_cli(["-p", "x", *options, "-o", "run.log", "--overwrite"]).ended(1)
    assert "--output and --log-file are one file" in both.err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_said_once_and_ends_nothing(run_cli: RunCli, options: list[str]) -> None:
    rows = {"p.jsonl": '{"prompt": "def"}\n{"prompt": "import"}\n'}
    outcome = run_cli(["p.jsonl", *options[:-1], "/dev/full", "-o", "out.jsonl"], files=rows).ended()
    assert len(Path("out.jsonl").read_text().splitlines()) == 2
    assert outcome.err.count("/dev/full") == 1
    assert "the log '/dev/full' lacks lines: it cannot be written (No space left on device)" in outcome.err
    assert "Traceback" not in outcome.err


@pytest.mark.skipif(sys.platform == "win32", reason="no rights in a mode")
def test_a_new_one_is_for_nobody_else_and_one_that_is_there_keeps_its_rights(
    run_cli: RunCli, options: list[str]
) -> None:
    for before, after in ((None, 0o600), (0o640, 0o640)):
        if before is not None:
            Path("run.log").chmod(before)
        assert run_cli(["-p", "x", *options, "--dry-run"]).code == 0
        assert Path("run.log").stat().st_mode & 0o777 == after


def test_a_configuration_that_is_only_looked_at_opens_no_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.toml").write_text('[defaults]\nlog_file = "run.log"\n')
    assert run(["--config", "c.toml", "config", "show"]) == 0
    assert "run.log" in capsys.readouterr().out
    assert not (tmp_path / "run.log").exists()
