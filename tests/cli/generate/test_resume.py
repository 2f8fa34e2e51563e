"""Output files survive: every record is whole and on the disk, and --resume runs exactly what is missing."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.cli import run
from edgespec.cli.generate.output_file import OutputFile
from edgespec.cli.generate.resume import check_same_run, config_hash, keep_finished, read_results
from edgespec.cli.prompts.rows import PromptRow, parse_row
from edgespec.errors import EdgespecError
from tests.cli.conftest import Outcome, RunCli, jsonl, written

CONFIG = {"target": "t 1", "temperature": 0.0, "tree.size": 32}
NUM_RECORDS = 5


def row(name: str, **settings_of_it: Any) -> PromptRow:
    return parse_row({"id": name, "prompt": f"text of {name}", **settings_of_it}, f"row {name}")


ROWS = [row(f"r{index}") for index in range(NUM_RECORDS)]


def record(prompt: PromptRow, *, config: dict[str, Any] = CONFIG, failed: bool = False) -> bytes:
    """As much of a record as going on with it needs."""
    return json.dumps(
        {
            "id": prompt.id,
            "prompt": prompt.as_written,
            "row_settings": prompt.settings.set_values(),
            "error": {"type": "E_NAN_LOGITS"} if failed else None,
            "finish_reason": "error" if failed else "stop",
            "config": config,
            "config_hash": config_hash(config),
            "text": "two\nlines and \u2028 one more",
        },
        ensure_ascii=False,
    ).encode()


WHOLE = b"".join(record(prompt) + b"\n" for prompt in ROWS)


@settings(max_examples=200, deadline=None)
@given(
    cut=st.integers(0, len(WHOLE)), tail=st.sampled_from([b"", b"\n", b"\0" * 40, b"{", b"  \n\n"]), crlf=st.booleans()
)
def test_a_file_cut_at_any_byte_is_gone_on_with(
    cut: int, tail: bytes, crlf: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """What is left are whole records; what is missing and what is done make up all, once each."""
    path = tmp_path_factory.getbasetemp() / "cut.jsonl"
    path.write_bytes((WHOLE[:cut] + tail).replace(b"\n", b"\r\n" if crlf else b"\n"))
    results = read_results(path, "jsonl")
    assert results.done == {prompt.id for prompt in ROWS[: len(results.done)]}
    assert len(results.done) >= WHOLE[:cut].count(b"\n")
    check_same_run(results, ROWS, CONFIG)
    with closing(OutputFile(path)) as file:
        keep_finished(file, results, {prompt.id for prompt in ROWS})
    with path.open("ab") as more:
        more.write(b"".join(record(prompt) + b"\n" for prompt in ROWS if prompt.id not in results.done))
    lines = [line for line in path.read_bytes().split(b"\n") if line.strip()]
    assert [json.loads(line)["id"] for line in lines] == [prompt.id for prompt in ROWS]


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=120) | st.text(max_size=80).map(str.encode), whole=st.booleans())
def test_any_file_is_results_or_an_error(data: bytes, whole: bool, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_bytes(data + (b"\n" + WHOLE if whole else b""))
    try:
        found = read_results(path, "jsonl").done
    except EdgespecError as error:
        assert error.code == "E_RESUME"  # noqa: PT017  # any other exception fails the test
    else:
        assert found == ({prompt.id for prompt in ROWS} if whole else set())


def test_failed_prompts_are_run_again_if_they_are_wanted(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(
        record(ROWS[0]) + b"\n" + record(ROWS[1], failed=True) + b"\n" + record(ROWS[2], failed=True) + b"\n"
    )
    results = read_results(path, "jsonl")
    assert (results.done, results.failed) == ({"r0"}, {"r1", "r2"})
    with closing(OutputFile(path)) as file:
        keep_finished(file, results, {"r1", "r3"})  # of a selection without r2
    assert [json.loads(line)["id"] for line in path.read_text(encoding="utf-8").split("\n") if line] == ["r0", "r2"]
    assert list(tmp_path.iterdir()) == [path]


def test_one_result_of_other_settings_among_those_of_this_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(record(ROWS[0]) + b"\n" + record(ROWS[1], config={**CONFIG, "temperature": 0.7}) + b"\n")
    with pytest.raises(EdgespecError, match=r"temperature 0\.7 there, 0\.0 here"):
        check_same_run(read_results(path, "jsonl"), ROWS, CONFIG)


@pytest.mark.parametrize(
    ("config", "rows", "named"),
    [
        ({**CONFIG, "temperature": 0.7}, ROWS, "temperature 0.0 there, 0.7 here"),
        ({**CONFIG, "stop": ["x"]}, ROWS, 'stop default there, ["x"] here'),
        ({"target": "t 1", "temperature": 0.0}, ROWS, "tree.size 32 there, default here"),
        (CONFIG, ROWS[1:], "not in the input: r0"),
        (CONFIG, [row("r0", seed=3, temperature=1), *ROWS[1:]], "'r0' (temperature, seed)"),
        (CONFIG, [parse_row({"id": "r0", "prompt": "new"}, "line 1"), *ROWS[1:]], "'r0' (prompt)"),
        (CONFIG, [row(f"r{i}", top_k=3) for i in range(NUM_RECORDS)], "'r4' (top_k)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_settings_or_prompts_are_refused_by_name(
    config: dict[str, Any], rows: list[PromptRow], named: str, tmp_path: Path
) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(WHOLE)
    with pytest.raises(EdgespecError) as caught:
        check_same_run(read_results(path, "jsonl"), rows, config)
    assert (caught.value.code, caught.value.exit_code) == ("E_RESUME", 2)
    assert named in caught.value.what
    assert "--force" in caught.value.fix


def test_texts_that_another_context_ends_are_other_texts(run_cli: RunCli, options: list[str], tmp_path: Path) -> None:
    """-c counts as any setting does."""
    command = [*options, "-n", "-1", "--resume"]
    assert run_cli([*command, "-c", "24"], files=prompts("a")).code == 0
    left = run_cli([*command, "-c", "24", "--dry-run"], files=prompts("a", "b"))
    assert "to do: 1 prompt, 1 answer, at most 23 new tokens" in left.err
    refused(run_cli([*command, "-c", "32"], files=prompts("a", "b")), 2, "context_tokens 24 there, 32 here")
    refused(run_cli(command, files=prompts("a", "b")), 2, "context_tokens 24 there, 256 here")
    assert run_cli([*command, "-c", "24"], files=prompts("a", "b")).code == 0
    records = written(tmp_path / "out.jsonl")
    assert [record["finish_reason"] for record in records] == ["context", "context"]


def test_a_damaged_line_in_the_middle_is_no_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(record(ROWS[0]) + b"\n{torn\n" + record(ROWS[1]) + b"\n")
    with pytest.raises(EdgespecError, match=r"line 2 of .* is no jsonl record"):
        read_results(path, "jsonl")
    path.write_bytes(WHOLE)
    with pytest.raises(EdgespecError, match="--format"):
        read_results(path, "specbench")


class _FullDisk:
    """A file on a disk that has room for so many bytes more."""

    def __init__(self, file: Any, largest_tree: int) -> None:
        self._file, self._room = file, largest_tree

    def write(self, data: memoryview) -> int:
        if not self._room:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = self._file.write(data[: self._room])
        self._room -= count
        return int(count)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def test_a_full_disk_leaves_whole_records_and_one_error(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    file = OutputFile(path)
    file.begin()
    file.write("first\n")
    file._file = _FullDisk(file._file, 4)
    with pytest.raises(EdgespecError, match="No space left") as caught:
        file.write("second\n")
    file.close()
    assert (caught.value.code, caught.value.exit_code) == ("E_OUTPUT", 1)
    assert "--resume" in caught.value.fix
    assert path.read_text() == "first\n"


def test_every_record_is_synced_before_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    path = tmp_path / "out.jsonl"
    file = OutputFile(path)
    monkeypatch.setattr(os, "fsync", lambda _descriptor: synced.append(path.stat().st_size))
    for _ in range(3):
        file.write("line\n")
    file.close()
    assert synced == [5, 10, 15]


def test_a_file_made_for_nothing_goes_and_one_to_overwrite_stays_until_the_run_begins(tmp_path: Path) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    OutputFile(new).close()
    assert not new.exists()
    old.write_text("results")
    OutputFile(old, overwrite=True).close()
    assert old.read_text() == "results"
    file = OutputFile(old, overwrite=True)
    file.begin()
    file.close()
    assert old.read_text() == ""


@pytest.fixture
def options(pair_folders: tuple[Path, Path], tmp_path: Path) -> list[str]:
    return ["p.jsonl", "-m", str(pair_folders[0]), "--temp", "0", "-n", "3", "-o", str(tmp_path / "out.jsonl")]


def prompts(*texts: str) -> dict[str, str]:
    return jsonl({"id": text, "prompt": text} for text in texts)


def refused(outcome: Outcome, code: int, *named: str) -> None:
    assert outcome.code == code
    assert outcome.err.count("Error: ") == 1
    assert "Traceback" not in outcome.err
    for part in named:
        assert part in outcome.err


def test_results_are_neither_lost_nor_mixed_unasked(run_cli: RunCli, options: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert run_cli([*options, "--resume"], files=prompts("a", "b")).code == 0  # nothing there to go on with
    whole = out.read_bytes()
    refused(run_cli(options, files=prompts("a", "b", "c")), 2, "has 2 of 3 results", "--resume", "--overwrite")
    refused(run_cli([*options, "--resume", "-n", "4"], files=prompts("a", "b")), 2, "max_new_tokens 3 there, 4 here")
    refused(run_cli([*options, "--resume"], files=prompts("a", "c")), 2, "not in the input: b")
    changed = {"p.jsonl": '{"id": "a", "prompt": "A"}\n{"id": "b", "prompt": "b", "seed": 1}\n'}
    refused(run_cli([*options, "--resume"], files=changed), 2, "'a' (prompt), 'b' (seed)")
    assert out.read_bytes() == whole
    done = run_cli([*options, "--resume"], files=prompts("b", "a")).ended()
    assert re.search(r"2 of 2 prompts are done; seed \d+\nnothing to do", done.err)
    assert run_cli([*options, "--resume", "--force", "-n", "4"], files=prompts("a", "c")).code == 0
    assert [record["id"] for record in written(out)] == ["a", "b", "c"]
    refused(run_cli([*options, "--resume", "--overwrite"]), 2, "one of them")
    refused(run_cli([*options, "--force"]), 2, "--resume")
    refused(run_cli([*options, "--resume", "--format", "text"]), 2, "ids")
    refused(run_cli(["p.jsonl", "--resume"]), 2, "-o FILE")


def test_resuming_gives_the_texts_of_an_uninterrupted_run(run_cli: RunCli, options: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert run_cli(options, files=prompts("a", "b", "c")).code == 0
    whole = {r["id"]: r["token_ids"] for r in written(out)}
    first = out.read_bytes().split(b"\n")[0] + b"\n"
    for kept in (b"", first[:-1], first + b'{"schema": "edges', first[:40]):
        out.write_bytes(kept)
        assert run_cli([*options, "--resume"], files=prompts("a", "b", "c")).code == 0
        assert {r["id"]: r["token_ids"] for r in written(out)} == whole
        assert len(out.read_text().splitlines()) == 3


@pytest.mark.parametrize("format_name", ["jsonl", "specbench", "openai-batch"])
def test_a_run_of_a_random_seed_is_gone_on_with_by_that_seed(
    format_name: str, run_cli: RunCli, pair_folders: tuple[Path, Path], tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    options = ["p.jsonl", "-m", str(pair_folders[0]), "--temp", "1", "-n", "6", "--format", format_name]
    options += ["-o", str(out), "--ordered"]

    def texts() -> list[Any]:
        kept = {
            "jsonl": ("text",),
            "specbench": ("choices", 0, "turns"),
            "openai-batch": ("response", "body", "choices"),
        }
        found = written(out)
        for key in kept[format_name]:
            found = [record[key] for record in found]
        return found

    assert run_cli(options, files=prompts("a", "b", "c")).code == 0
    whole = texts()
    out.write_bytes(out.read_bytes().split(b"\n")[0] + b"\n")
    resumed = run_cli([*options, "--resume"], files=prompts("a", "b", "c")).ended()
    assert texts() == whole
    seed = re.search(r"1 of 3 prompts are done; seed (\d+)", resumed.err)
    assert seed
    assert run_cli([*options, "--resume", "--seed", seed[1]], files=prompts("a", "b", "c")).code == 0
    refused(
        run_cli([*options, "--resume", "--seed", str(int(seed[1]) + 1)], files=prompts("a", "b", "c")), 2, "--force"
    )


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGTERM")
@pytest.mark.parametrize(("num_records", "signal_name", "status"), [(0, "SIGTERM", 143), (1, "SIGHUP", 129)])
def test_what_a_signal_ends_goes_on_by_the_command_that_it_prints(
    num_records: int,
    signal_name: str,
    status: int,
    tmp_path: Path,
    pair_folders: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also before there is a record that could tell the seed."""
    (tmp_path / "p.jsonl").write_text(prompts("a", "b", "c")["p.jsonl"])
    common = ["p.jsonl", "-m", str(pair_folders[0].absolute()), "--temp", "1", "-n", "80", "-np", "1", "-o"]
    command = [sys.executable, "-m", "edgespec", "generate"]
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    out = tmp_path / "out.jsonl"
    with (tmp_path / "said").open("w+") as stderr:
        process = subprocess.Popen([*command, *common, out.name], cwd=tmp_path, env=environment, stderr=stderr)
        while process.poll() is None and not (
            "layers resident" in (tmp_path / "said").read_text()
            and out.exists()
            and out.read_bytes().count(b"\n") >= num_records
        ):
            time.sleep(0.01)
        if num_records == 0:
            time.sleep(0.3)  # until the models are loaded
        process.send_signal(getattr(signal, signal_name))
        process.wait(timeout=60)
    said = (tmp_path / "said").read_text()
    if "to go on" not in said:
        pytest.skip("it ended before, or had not begun")
    assert process.returncode == status
    assert "Traceback" not in said
    words = shlex.split(said.partition("to go on: edgespec generate ")[2])
    monkeypatch.chdir(tmp_path)
    for arguments in (words, [*common, "whole.jsonl", "--seed", words[words.index("--seed") + 1]]):
        assert run(["generate", *arguments]) == 0
    resumed, whole = (
        {record["id"]: record["text"] for record in written(path)} for path in (out, tmp_path / "whole.jsonl")
    )
    assert resumed == whole


@pytest.mark.usefixtures("no_weights_read")
@pytest.mark.parametrize("kind", ["file in place of a folder", "no rights"])
def test_an_output_that_cannot_be_opened_is_refused_before_weights_are_read(
    kind: str, run_cli: RunCli, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "no rights":
        open_path = Path.open

        def refuse(self: Path, *arguments: Any, **more: Any) -> Any:
            if self.name == "out.jsonl":
                raise PermissionError(errno.EACCES, "Permission denied")
            return open_path(self, *arguments, **more)

        monkeypatch.setattr(Path, "open", refuse)
        refused(run_cli(options, files=prompts("a")), 1, "cannot be written (Permission denied)")
    else:
        (tmp_path / "file").write_text("")
        refused(run_cli([*options[:-1], str(tmp_path / "file" / "out")], files=prompts("a")), 1, "no folder")
