"""One run at a time writes an output file: results are read when no other run can add to them."""

import os
import signal
import sys
from contextlib import closing
from pathlib import Path

import pytest

from edgespec.cli import ctrl_c
from edgespec.cli.generate import command, output_file
from edgespec.cli.generate.output_file import OutputFile
from edgespec.cli.generate.resume import keep_finished, read_results
from edgespec.errors import EdgespecError
from tests.cli.conftest import RunCli, written
from tests.cli.generate.test_resume import ROWS, options, prompts, record, refused

__all__ = ["options"]  # a fixture
locks = pytest.mark.skipif(sys.platform == "win32", reason="locks lie in a file beside it")
TAKEN = "another run is writing"


@locks
def test_two_runs_do_not_write_one_file(run_cli: RunCli, options: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    file = OutputFile(out)
    for flags in ([], ["--resume"], ["--overwrite"]):
        refused(run_cli([*options, *flags], files=prompts("a")), 1, TAKEN)
    assert run_cli([*options, "--dry-run"], files=prompts("a")).code == 0  # which writes nothing
    file.close()
    assert not out.exists()
    assert run_cli([*options, "--dry-run"], files=prompts("a")).code == 0
    assert not out.exists()
    assert run_cli(options, files=prompts("a")).code == 0


@locks
def test_a_run_that_ends_while_another_resumes_doubles_nothing(
    run_cli: RunCli, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier run writes its last record while the later one imports torch, which takes seconds."""
    out = tmp_path / "out.jsonl"
    assert run_cli(options, files=prompts("a", "b")).code == 0
    first, last = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(first)
    earlier, right = OutputFile(out), command.import_engine

    def end_earlier(*arguments: object, **more: object) -> None:
        earlier.write(last.decode())
        earlier.close()
        right(*arguments, **more)

    monkeypatch.setattr(command, "import_engine", end_earlier)
    refused(run_cli([*options, "--resume"], files=prompts("a", "b")), 1, TAKEN)
    assert out.read_bytes() == first
    earlier.close()
    monkeypatch.setattr(command, "import_engine", right)
    assert run_cli([*options, "--resume"], files=prompts("a", "b")).code == 0
    assert [record["id"] for record in written(out)] == ["a", "b"]


@locks
@pytest.mark.parametrize("is_link", [False, True])
def test_a_file_that_is_replaced_stays_taken(is_link: bool, tmp_path: Path) -> None:
    """A record that failed is dropped, and so the file is another one; it keeps its rights."""
    path = out = tmp_path / "out.jsonl"
    path.write_bytes(record(ROWS[0]) + b"\n" + record(ROWS[1], failed=True) + b"\n")
    path.chmod(0o640)
    if is_link:
        path = tmp_path / "link"
        path.symlink_to(out)
    before = out.stat()
    with closing(OutputFile(path)) as file:
        keep_finished(file, read_results(path, "jsonl"), {"r1"})
        assert not os.path.samestat(before, out.stat())
        assert out.stat().st_mode == before.st_mode
        for name in (path, out):
            with pytest.raises(EdgespecError, match=TAKEN):
                OutputFile(name)
        file.write("more\n")
    assert out.read_bytes() == record(ROWS[0]) + b"\nmore\n"
    assert path.is_symlink() == is_link


@locks
@pytest.mark.parametrize("how", ["replaced", "removed"])
def test_a_file_that_goes_while_it_is_opened_is_opened_anew(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever held the lock until now has put another in its place, or removed it: what is written there is lost."""
    path, right = tmp_path / "out.jsonl", output_file._lock
    path.write_text("old\n")

    def lock(descriptor: int) -> bool:
        monkeypatch.setattr(output_file, "_lock", right)
        path.unlink()
        if how == "replaced":
            path.write_text("new\n")
        return right(descriptor)

    monkeypatch.setattr(output_file, "_lock", lock)
    with closing(OutputFile(path)) as file:
        file.write("more\n")
    assert path.read_text() == ("new\nmore\n" if how == "replaced" else "more\n")


@locks
def test_whoever_comes_between_a_new_file_and_its_lock_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, right = tmp_path / "out.jsonl", output_file._lock
    path.write_bytes(record(ROWS[0]) + b"\n" + record(ROWS[1], failed=True) + b"\n")
    others: list[OutputFile] = []

    def lock(descriptor: int) -> bool:
        monkeypatch.setattr(output_file, "_lock", right)
        others.append(OutputFile(path))
        return right(descriptor)

    with closing(OutputFile(path)) as file:
        monkeypatch.setattr(output_file, "_lock", lock)
        with pytest.raises(EdgespecError, match=TAKEN):
            keep_finished(file, read_results(path, "jsonl"), {"r1"})
    others[0].write("more\n")
    others[0].close()
    assert path.read_bytes() == record(ROWS[0]) + b"\nmore\n"


@locks
@pytest.mark.parametrize("act", ["replace", "unlink"])
def test_a_file_is_locked_until_another_has_its_name_or_none(
    act: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or what a run writes that opens it just before would be lost."""
    path, right = tmp_path / "out.jsonl", getattr(Path, act)
    num_tried = 0

    def try_to_open(self: Path, *arguments: object, **more: object) -> object:
        nonlocal num_tried
        num_tried += 1
        with pytest.raises(EdgespecError, match=TAKEN):
            OutputFile(path)
        return right(self, *arguments, **more)

    file = OutputFile(path)
    if act == "replace":
        file.write("old\n")
    with monkeypatch.context() as patch:
        patch.setattr(Path, act, try_to_open)
        if act == "replace":
            file.rewrite(b"new\n")
        else:
            file.close()
    file.close()
    assert num_tried == 1
    assert path.exists() == (act == "replace")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_what_cannot_be_resumed_is_not_advised_to_be(run_cli: RunCli, options: list[str]) -> None:
    outcome = run_cli([*options[:-1], "/dev/full"], files=prompts("a"))
    refused(outcome, 1, "cannot write results to '/dev/full' (No space left on device)", "elsewhere")
    assert "stopped with 0 of 1 record written" in outcome.err
    assert "--resume" not in outcome.err


def test_texts_without_ids_are_not_advised_to_be_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = OutputFile(tmp_path / "out.txt", has_ids=False)
    monkeypatch.setattr(os, "fsync", lambda _descriptor: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(EdgespecError) as caught:
        file.write("text\n")
    file.close()
    assert "--overwrite" in caught.value.fix
    assert not file.can_resume


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
def test_ctrl_c_while_torch_is_imported_leaves_no_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = OutputFile(tmp_path / "out.jsonl")
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    with ctrl_c.leaving_at_once(file.close):
        signal.raise_signal(signal.SIGINT)
    assert left == [130]
    assert list(tmp_path.iterdir()) == []
