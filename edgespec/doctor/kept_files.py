"""What can be made again: quantised copies, tokenizers, kernels, profiles, speeds, drafts' yields, prompts."""

import datetime
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from edgespec.doctor.checks import size_of
from edgespec.pair.score_merges import FOLDER, SUFFIX
from edgespec.prefix_cache.prompt_files import noted_files
from edgespec.user_paths import KERNELS, LEARNED, cache_folder, machine_file, profiles_folder

KINDS = {
    "quantized": "layers that were quantised once",
    "tokenizers": "merges of GGUF files' tokenizers, which take seconds to make",
    "kernels": "code that was compiled for this processor",
    "profiles": "what edgespec profile measured",
    "speeds": "what edgespec estimate measured of this machine",
    "drafts": "how far drafts' guesses went in earlier runs, and what their trees took",
    "prompts": "prompt caches, which lie where the user put them",
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
    model: str | None = None  # that a prompt cache is of
    used: str | None = None  # the day on which a prompt cache was last used
    note: Path | None = None  # the file that tells of a prompt cache


def kept_files() -> Iterator[KeptFile]:
    """Yield all that is there, by kind and name."""
    quantized = cache_folder() / "quantized"
    places = {
        "quantized": [path for path in _below(quantized) if path.is_dir()],
        "tokenizers": [path for path in _below(cache_folder() / FOLDER) if path.suffix == SUFFIX],
        "kernels": [path for path in _below(cache_folder() / KERNELS) if path.suffix == ".o"],
        "profiles": [path for path in _below(profiles_folder()) if path.suffix == ".toml"],
        "speeds": [path for path in (machine_file(),) if path.is_file()],
        "drafts": [path for path in _below(cache_folder() / LEARNED) if path.suffix == ".json"],
    }
    for kind, paths in places.items():
        for path in paths:
            name = path.stem if path.is_file() else path.name
            yield KeptFile(kind=kind, name=name, path=path, num_bytes=size_of(path)[0], changed=_changed(path))
    for file in noted_files():
        yield KeptFile(
            kind="prompts", name=str(file.path), path=file.path, num_bytes=size_of(file.path)[0],
            changed=_changed(file.path), model=file.model, used=_day(file.used_s), note=file.note,
        )  # fmt: skip


def remove(kept: KeptFile) -> bool:
    """Remove it, and return whether that was done: a copy that is being written stays. Raises OSError."""
    if kept.path.is_file():
        kept.path.unlink()
        if kept.note is not None:
            kept.note.unlink(missing_ok=True)
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


def _changed(path: Path) -> str:
    return _day(path.stat().st_mtime)


def _day(time_s: float) -> str:
    return datetime.datetime.fromtimestamp(time_s).astimezone().strftime("%Y-%m-%d")


def _below(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []
