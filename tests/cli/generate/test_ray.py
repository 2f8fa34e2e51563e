"""Ray itself, where it is installed: a cluster of this machine, one of whose workers is killed."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray")

from tests.support.runs import compare, read, start, wait_for, workers_of

ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder with prompts; Ray's own is another, whose name is short enough for its sockets."""
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as short:
        monkeypatch.setenv("RAY_TMPDIR", short)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
        rows = [{"id": f"p{n}", "prompt": f"def f{n}(", "temperature": 0.8} for n in range(24)]
        (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        yield tmp_path


def test_workers_write_what_one_process_writes_also_where_one_is_killed(folder: Path) -> None:
    options = ["-n", "16", "--seed", "3", "--dtype", "float32"]
    assert start(folder / "p.jsonl", folder / "one.jsonl", *options).communicate(timeout=120)[1] is not None
    process = start(folder / "p.jsonl", folder / "many.jsonl", *options, "--ray", "local", "--workers", "2")
    assert wait_for(process, folder / "many.jsonl", 2)
    workers_of(process)[0].kill()
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said.decode()
    assert "is lost (its process ended)" in said.decode()
    counts = compare(read(folder / "one.jsonl"), read(folder / "many.jsonl"))
    assert {name: counts[name] for name in ("lost", "doubled", "different")} == {
        "lost": 0, "doubled": 0, "different": 0,
    }  # fmt: skip
