"""The names of GGUF files: which belong to one model, and which say their type. This module loads no library."""

import re
from collections.abc import Iterable
from pathlib import Path

from offload.errors import CheckpointError

MAGIC = b"GGUF"
SUFFIX = ".gguf"
SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)
SIDE = "mtp-"  # begins the name of a file that has a model's layer for a further token alone
TYPE = re.compile(r"[-.](UD-)?(I?Q\d\w*|TQ\d\w*|BF16|F16|F32|MXFP4\w*|NVFP4)$", re.IGNORECASE)  # ends a name
NUM_NAMED = 4  # missing parts in an error


def is_gguf(path: Path) -> bool:
    """Return whether a path leads to a GGUF file, by its name, or by its first bytes where it has another."""
    try:
        if not path.is_file():
            return False
        if path.suffix.lower() == SUFFIX:
            return True
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except (OSError, ValueError):  # not to be read, or a name that no file can have
        return False


def parts_of(path: Path) -> list[Path]:
    """Return all files of the model that a file is a part of; raises CheckpointError where one is missing."""
    split = SPLIT.search(path.name)
    if split is None:
        return [path]
    count = int(split[2])
    parts = [
        path.with_name(f"{path.name[: split.start()]}-{n:05}-of-{count:05}{path.suffix}") for n in range(1, count + 1)
    ]
    missing = [part.name for part in parts if not part.is_file()]
    if missing or not count:
        raise CheckpointError(
            "E_SHARD_MISSING",
            f"{len(missing)} of {count} parts of '{path.name}' are missing from '{path.parent}': "
            f"{', '.join(missing[:NUM_NAMED])}.",
            "Download the missing files.",
        )
    return parts


def one_of_each_model(paths: Iterable[Path]) -> list[Path]:
    """Return a file of each model: of those in parts, the first that is there."""
    found: dict[tuple[Path, str], Path] = {}
    for path in sorted(paths):
        found.setdefault(_model_of(path), path)
    return list(found.values())


def all_of_one_model(path: Path, paths: Iterable[Path]) -> list[Path]:
    """Return those of some files that are of the same model."""
    return [other for other in paths if _model_of(other) == _model_of(path)]


def _model_of(path: Path) -> tuple[Path, str]:
    return path.parent, SPLIT.sub("", path.name)


def says_type(path: str, tag: str) -> bool:
    """Return whether a file's name, perhaps below a folder's, has a type in it as a word of its own: Q4_K_M."""
    word = rf"(?<![A-Za-z0-9]){re.escape(tag)}(?![A-Za-z0-9_])"
    return re.search(word, SPLIT.sub("", path), re.IGNORECASE) is not None


def side_layer_of(path: Path) -> Path | None:
    """Return the file beside a model's whose name says that it has the model's layer for a further token.

    Of several, that of the model's own type counts, else the first by name.
    """
    stem = _stem(path)
    found = [
        other
        for other in sorted(path.parent.glob(f"{SIDE}*{SUFFIX}"))
        if TYPE.sub("", _stem(other).removeprefix(SIDE)) == TYPE.sub("", stem)
    ]
    return next((other for other in found if _stem(other) == SIDE + stem), found[0] if found else None)


def _stem(path: Path) -> str:
    return SPLIT.sub("", path.name).removesuffix(SUFFIX)
