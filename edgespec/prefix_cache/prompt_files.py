"""Which files of prompts' beginnings were used here, wherever they lie; of the files it knows the header alone.

Each has a note in the user's home, a small file that holds its path, written anew whenever it is used.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from edgespec.user_paths import make_folder, prompt_notes_folder, written_whole
from edgespec.validation import parse_json

SCHEMA = "edgespec.prompt/1"
HEADER = "edgespec"  # key of the file's metadata


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFile:
    """A file that is there, and is a prompt cache."""

    path: Path
    model: str  # the target's name
    used_s: float  # when it was last used, since the epoch
    note: Path  # the file that names it


def note_use(path: Path) -> None:
    """Note that a file is used; a home that cannot be written ends nothing."""
    path = path.parent.resolve() / path.name
    name = hashlib.blake2b(os.fsencode(path), digest_size=8).hexdigest()
    note = prompt_notes_folder() / f"{name}.json"
    with contextlib.suppress(OSError):
        make_folder(note.parent)
        with written_whole(note) as partial:
            partial.write_text(json.dumps({"path": os.fspath(path)}) + "\n", encoding="utf-8")


def noted_files() -> Iterator[PromptFile]:
    """Yield the files that are still there and still prompt caches; the notes of those that are gone are dropped."""
    folder = prompt_notes_folder()
    for note in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        try:
            path = Path(parse_json(note.read_text(encoding="utf-8"))["path"])
            with safe_open(path, "np") as file:  # which loads no torch
                header = parse_json((file.metadata() or {})[HEADER])
            if header["schema"] == SCHEMA:
                yield PromptFile(path=path, model=header["target"]["name"], used_s=note.stat().st_mtime, note=note)
        except FileNotFoundError:
            with contextlib.suppress(OSError):
                note.unlink(missing_ok=True)
        except (OSError, SafetensorError, ValueError, KeyError, TypeError):  # another file lies there now
            continue
