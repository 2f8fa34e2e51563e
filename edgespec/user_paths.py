"""The places of edgespec's own files, files that are written whole or not at all, and JSON for terminals.

The places are below EDGESPEC_HOME, or the system's for each kind. A user may have no home folder, as in a container:
then they are below NO_HOME, where no file can be made, as in a home that cannot be written.
"""

import atexit
import contextlib
import functools
import json
import logging
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path, user_config_path, user_data_path, user_state_path

from edgespec.errors import EdgespecError

logger = logging.getLogger("edgespec.user_paths")
CONFIG_NAME = "config.toml"
KERNELS = "kernels"  # the folder of compiled ones, in that for files that can be made again
LEARNED = "drafts"  # and the folder of what runs have learned of drafts
NO_HOME = Path(__file__) / "no-home"  # below a file there can be none
SET_HOME = "Set EDGESPEC_HOME to a folder that can be written."
# Characters that a terminal obeys, or that hide or reorder text: control characters but line ends and tabs, line
# separators, embedded directions, half surrogates. Joiners, marks and unusual blanks are text.
CONTROL = re.compile(r"\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
HALF_CHARACTER = re.compile("[\ud800-\udfff]")  # Python's form of bytes that are not UTF-8
PARTIAL = ".partial"  # of a file that is being written
LEFT_OVER_S = 24 * 3600
MAX_PREFIX_CHARACTERS = 40  # of the file's own name: with the rest, no name is too long
PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700


def cache_folder() -> Path:
    """Return the folder for files that can be made again.

    It is EDGESPEC_CACHE, or below EDGESPEC_HOME, or the system's place for caches.
    """
    if os.environ.get("EDGESPEC_CACHE"):
        return Path(os.environ["EDGESPEC_CACHE"])
    return _below_home("cache") or _system_place(user_cache_path)


def cache_of_process(error: Exception) -> Path:
    """Return a folder in place of the cache, which goes with this process; raises `error` if it cannot be made."""
    try:
        return _cache_of_process()
    except OSError:
        raise error from None


@functools.cache
def _cache_of_process() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="edgespec-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    why = f"'{cache_folder()}' cannot be written" if has_place(cache_folder()) else "the user has no home folder"
    logger.warning("nothing is kept for later runs: %s; EDGESPEC_HOME chooses another place", why)
    return folder


def profiles_folder() -> Path:
    """Return the folder for measured profiles: below EDGESPEC_HOME, or the system's place for state."""
    return _below_home("profiles") or _system_place(user_state_path) / "profiles"


def config_file() -> Path:
    """Return the user's own configuration: below EDGESPEC_HOME, or the system's place for configurations."""
    return _below_home(CONFIG_NAME) or _system_place(user_config_path) / CONFIG_NAME


def config_files(named: Path | None = None) -> list[Path]:
    """Return the configuration `named`, here or by EDGESPEC_CONFIG, and after it the user's own, if there is one."""
    named = named or (Path(os.environ["EDGESPEC_CONFIG"]) if os.environ.get("EDGESPEC_CONFIG") else None)
    found, own = [] if named is None else [named], config_file()
    if _exists(own) and not any(_exists(file) and own.samefile(file) for file in found):
        found.append(own)
    return found


def machine_file() -> Path:
    """Return the file of this machine's measured speeds: below EDGESPEC_HOME, or the system's place for state."""
    return _below_home("machine.json") or _system_place(user_state_path) / "machine.json"


def prompt_notes_folder() -> Path:
    """Return the folder of notes that tell where prompt caches lie: below EDGESPEC_HOME, or the system's for state."""
    return _below_home("prompts") or _system_place(user_state_path) / "prompts"


def history_file() -> Path:
    """Return the file of the lines typed in a chat: below EDGESPEC_HOME, or the system's place for state."""
    return _below_home("history") or _system_place(user_state_path) / "history"


def sessions_folder() -> Path:
    """Return the folder for saved chats: below EDGESPEC_HOME, or the system's place for data."""
    return _below_home("sessions") or _system_place(user_data_path) / "sessions"


def recent_folder() -> Path:
    """Return the folder for the last chats, which are saved by themselves."""
    return sessions_folder() / "recent"


def json_text(value: Any, *, indent: int | None = None) -> str:
    """Return JSON with the characters of all languages and escaped control characters, safe for terminals."""
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    return CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it, for the user alone; existing ones stay as they are."""
    for each in (*reversed(folder.parents), folder):
        each.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)


@contextlib.contextmanager
def written_whole(path: Path, *, is_private: bool = True) -> Iterator[Path]:
    """Yield a file beside `path` to write to, which takes its name at the end; if writing fails, nothing is left.

    It is new, under an unguessable name: no existing file or link is written to. A private one is for the user alone;
    another has the rights of the file that it replaces, or of any new one.
    """
    prefix = f".{path.name[:MAX_PREFIX_CHARACTERS]}."
    partial = path.with_name(f"{prefix}{secrets.token_hex(8)}{PARTIAL}")
    partial.touch(PRIVATE_FILE if is_private else 0o666, exist_ok=False)
    rights = stat.S_IMODE(partial.stat().st_mode)
    try:
        drop_left_over(path.parent, prefix)
        yield partial
        with contextlib.suppress(OSError):  # the file is missing, or the file system has no rights
            if not is_private and path.exists():
                rights = stat.S_IMODE(path.stat().st_mode)
            partial.chmod(rights)  # a library may have put a file of its own in the place
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def drop_left_over(folder: Path, prefix: str) -> None:
    """Remove partial files of killed processes: those that were not written to for a day."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if (
                entry.name.startswith(prefix)
                and entry.name.endswith(PARTIAL)
                and time.time() - entry.stat(follow_symlinks=False).st_mtime > LEFT_OVER_S
            ):
                Path(entry.path).unlink()


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # in a folder that may not be entered
        return False


def shown_place(path: Path) -> str:
    """Return a place in words: its path, or the reason why there is none."""
    return str(path) if has_place(path) else "nowhere, for the user has no home folder: set EDGESPEC_HOME"


def has_place(path: Path) -> bool:
    """Return whether a place of ours exists: a user without a home folder has none."""
    return NO_HOME not in (path, *path.parents)


def require_place(path: Path) -> None:
    """Raise EdgespecError where a place of ours does not exist."""
    if not has_place(path):
        raise EdgespecError("E_OUTPUT", "there is no place to write to: the user has no home folder.", SET_HOME)


def expanded(text: str) -> Path:
    """Return a path with ~ for the home folder; raises EdgespecError where there is none."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise EdgespecError(
            "E_FILE_NOT_FOUND", f"'{text}' is below a home folder that is not known.", "Name the folder itself."
        ) from error


def _system_place(place: Callable[..., Path]) -> Path:
    """Return the system's place of a kind, if its path is absolute: others would lie below the working folder."""
    try:
        found = place("edgespec", appauthor=False)
    except RuntimeError:
        return NO_HOME
    return found if found.is_absolute() else NO_HOME


def _below_home(name: str) -> Path | None:
    home = os.environ.get("EDGESPEC_HOME")
    return Path(home) / name if home else None
