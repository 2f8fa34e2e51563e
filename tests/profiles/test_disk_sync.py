"""A file system that cannot sync ends nothing; a disk that fails does."""

import errno
import os
from pathlib import Path

import pytest

from edgespec.cli.generate.output_file import OutputFile, replaced_file
from edgespec.doctor import disk_speed
from edgespec.errors import EdgespecError
from profiles.disk_sync import sync_to_disk
from profiles.measure import drop_page_cache


def failing(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def fail(_descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP])
def test_results_are_written_where_the_file_system_cannot_sync(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records, a file that is replaced or cut, and what is measured."""
    failing(monkeypatch, number)
    output = OutputFile(tmp_path / "out.jsonl")
    output.begin()
    output.write("one\n")
    output.write("two\n")
    output.cut(4)
    output.close()
    assert (tmp_path / "out.jsonl").read_text() == "one\n"
    with replaced_file(tmp_path / "out.jsonl") as file:
        file.write(b"other\n")
    assert (tmp_path / "out.jsonl").read_text() == "other\n"
    drop_page_cache([tmp_path / "out.jsonl"])
    monkeypatch.setattr(disk_speed, "MAX_WRITTEN_BYTES", disk_speed.CHUNK_BYTES)
    assert disk_speed.scratch_speed(tmp_path).num_bytes


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fails_is_an_error(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, number)
    with pytest.raises(OSError, match=os.strerror(number)):
        sync_to_disk(0)
    output = OutputFile(tmp_path / "out.jsonl")
    with pytest.raises(EdgespecError, match="cannot write results"):
        output.write("one\n")
    output.close()
