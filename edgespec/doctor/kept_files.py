"""What edgespec has written to the user's folders and can make again: quantised copies, profiles, measured speeds."""

from __future__ import annotations

import datetime
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from edgespec.doctor.checks import size_of
from edgespec.files import cache_folder, machine_file, profiles_folder

KINDS = {
    "quantized": "layers that were quantised once",
    "profiles": "what edgespec profile measured",
    "speeds": "what edgespec estimate measured of this machine",
}
LOCK = ".lock"  # beside a quantised copy, held while it is written
PARTIAL = ".partial"  # of a copy whose writing was cut


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptFile:
    """A file, or a folder of files, that can be made again."""

    kind: str
    name: str
    path: Path
    num_bytes: int
    changed: str  # the day


def kept_files() -> Iterator[KeptFile]:
    """Yield all that is there, by kind and name."""
    quantized = cache_folder() / "quantized"
    places = {
        "quantized": [path for path in _below(quantized) if path.is_dir()],
        "profiles": [path for path in _below(profiles_folder()) if path.suffix == ".toml"],
        "speeds": [path for path in (machine_file(),) if path.is_file()],
    }
    for kind, paths in places.items():
        for path in paths:
            name = path.stem if path.is_file() else path.name
            day = datetime.datetime.fromtimestamp(path.stat().st_mtime).astimezone().strftime("%Y-%m-%d")
            yield KeptFile(kind=kind, name=name, path=path, num_bytes=size_of(path)[0], changed=day)


def remove(kept: KeptFile) -> bool:
    """Remove it, and return whether that was done: a copy that is being written stays. Raises OSError."""
    if kept.path.is_file():
        kept.path.unlink()
        return True
    lock = FileLock(f"{kept.path.with_name(kept.path.name.removesuffix(PARTIAL))}{LOCK}")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return False
    try:
        shutil.rmtree(kept.path)
    finally:
        lock.release()
    Path(lock.lock_file).unlink(missing_ok=True)
    return True


def _below(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []
