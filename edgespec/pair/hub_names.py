"""The folder of what people call a model is found here: a path, an alias, or a name of the Hugging Face cache.

Only `download` reaches for the network, and it is called only where somebody asked for it.
huggingface_hub is imported when a name is no folder.
"""

from __future__ import annotations

import difflib
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from edgespec.errors import EdgespecError

NUM_CLOSEST = 3
CLOSE = 0.55  # of difflib's likeness: 'Qwen3-8b' is close to 'Qwen/Qwen3-8B', 'gpt2' is not
POLL_S = 0.5  # between looks at how far a download is
DOWNLOAD_MARGIN_BYTES = 1 << 30  # left free on the disk
REPOSITORY = re.compile(r"\w[\w.-]{0,95}(/\w[\w.-]{0,95})?", re.ASCII)
BUILT_IN_HEAD = "built-in-head"  # a feature head of the built-in target
BUILT_IN_HEAD_FOLDER = Path(__file__).parents[1] / "demo" / "head"
CACHED_PREFIX = "models--"
# What a model folder needs here; weights in other formats and folders within the repository are not among it.
WANTED_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]
UNWANTED_FILES = ["*/*", "consolidated*"]

Progress = Callable[[int, int], None]  # bytes that are there, bytes in all


def resolve_model(
    name: str,
    *,
    revision: str | None = None,
    aliases: Mapping[str, str] | None = None,
    online: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Return the folder that `name` means; raises EdgespecError with the closest names where it means none.

    A folder comes first, then the built-in head, an alias, and the local cache; with `online`, what the cache lacks
    of a published model is downloaded into it.
    """
    if not name.strip():
        raise EdgespecError("E_MODEL_NOT_FOUND", "the model's name is empty.", "Give a folder or a name.")
    path = local_path(name)
    if path.name.startswith(CACHED_PREFIX) and (path / "snapshots").is_dir():
        found = find_cached(_repository_of(path), revision=revision, cache=path.parent)
        if found is not None:
            return found
    if is_there(path):
        _check_path(path, revision)
        return path
    if name == BUILT_IN_HEAD:
        _check_path(BUILT_IN_HEAD_FOLDER, revision)
        return BUILT_IN_HEAD_FOLDER
    known = dict(aliases or {})
    meant = known.get(name, name)
    if meant != name and is_there(local_path(meant)):
        return resolve_model(meant, revision=revision)
    if not REPOSITORY.fullmatch(meant):
        raise _not_found(name, meant, f"there is no folder '{meant}'.", known)
    if online:
        return download(meant, revision=revision, progress=progress)
    folder = find_cached(meant, revision=revision)
    if folder is None:
        raise _missing(name, meant, revision, known)
    return folder


def local_path(name: str) -> Path:
    """Return the name as a path, with ~ for the home folder."""
    path = Path(name)
    try:
        return path.expanduser()
    except RuntimeError:  # ~somebody, who is not known here
        return path


def is_there(path: Path) -> bool:
    """Return whether there is a file or a folder; none has a name that is too long."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def find_cached(repository: str, *, revision: str | None = None, cache: Path | None = None) -> Path | None:
    """Return a model's snapshot in the local cache, whole or not; None where there is none. Asks no network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        # The config alone says that there is a model: what else is missing of it is told where it is read.
        return Path(
            snapshot_download(
                repository,
                revision=revision,
                cache_dir=cache,
                local_files_only=True,
                allow_patterns=["config.json"],
            )
        )
    except LocalEntryNotFoundError as error:
        found = getattr(error, "snapshot_path", None)  # of one that lacks even that; older versions do not tell
        return Path(found) if found else None
    except HFValidationError:
        return None


def short_name(folder: Path) -> str:
    """Return what people call a model's folder: a snapshot in the cache by its repository, others by their own name."""
    whole = folder.absolute()  # '.' has no name of its own
    if whole.parent.name == "snapshots" and whole.parent.parent.name.startswith(CACHED_PREFIX):
        return _repository_of(whole.parent.parent)
    return whole.name


def hub_cache() -> Path:
    """Return the folder of the local cache of Hugging Face's libraries."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def cached_repositories() -> Iterator[tuple[str, Path]]:
    """Return names of the models downloaded here, in whole or in part, each with its folder in the cache."""
    folder = hub_cache()
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if path.name.startswith(CACHED_PREFIX) and (path / "snapshots").is_dir():
            yield _repository_of(path), path


def _repository_of(cached: Path) -> str:
    return cached.name.removeprefix(CACHED_PREFIX).replace("--", "/")


def download(repository: str, *, revision: str | None = None, progress: Progress | None = None) -> Path:
    """Bring a model's safetensors, configuration and tokenizer into the cache; raises EdgespecError."""
    import shutil

    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    with _network():
        listed = snapshot_download(
            repository, revision=revision, allow_patterns=WANTED_FILES, ignore_patterns=UNWANTED_FILES, dry_run=True
        )
    missing_bytes = sum(file.file_size or 0 for file in listed if file.will_download)
    total_bytes = sum(file.file_size or 0 for file in listed)
    cache = hub_cache()
    if not cache.is_absolute() and cache.parts[0] == "~":  # nobody's home: it would be a folder beside one's work
        what = f"there is no place for '{repository}': the user has no home folder."
        raise EdgespecError("E_DOWNLOAD", what, "Set HF_HOME to a folder that can be written.")
    cache.mkdir(parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(cache).free
    if missing_bytes + DOWNLOAD_MARGIN_BYTES > free_bytes:
        raise EdgespecError(
            "E_DOWNLOAD",
            f"'{repository}' takes {missing_bytes / 2**30:.1f} GiB more, and {free_bytes / 2**30:.1f} GiB "
            f"are free at '{cache}'.",
            "Free some space, or set HF_HOME to a folder on a larger disk.",
        )
    blobs = cache / (CACHED_PREFIX + repository.replace("/", "--")) / "blobs"
    with _network(), _watched(blobs, total_bytes, progress):
        return Path(
            snapshot_download(
                repository, revision=revision, allow_patterns=WANTED_FILES, ignore_patterns=UNWANTED_FILES
            )
        )


@contextmanager
def _network() -> Iterator[None]:
    """Within this block huggingface_hub may use the network; raises EdgespecError for what it meets."""
    from huggingface_hub import constants

    was_offline = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = False
    try:
        yield
    except Exception as error:  # a dozen kinds, of two libraries: no such model, no permission, no network, no space
        cause = error.__cause__ or error
        reason = (str(cause).strip() or "no reason given").splitlines()[0][:200]
        raise EdgespecError(
            "E_DOWNLOAD",
            f"the download failed ({type(cause).__name__}: {reason}).",
            "Check name, network and, for a gated model, `hf auth login`; "
            "or leave out `local_files_only=False` for what is here.",
        ) from error
    finally:
        constants.HF_HUB_OFFLINE = was_offline


@contextmanager
def _watched(blobs: Path, total_bytes: int, progress: Progress | None) -> Iterator[None]:
    """Within this block, report now and then how many bytes lie in a folder that is being filled."""
    ended = threading.Event()

    def watch() -> None:
        while progress is not None and not ended.wait(POLL_S):
            progress(min(total_bytes, folder_bytes(blobs)), total_bytes)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
        if progress is not None:
            progress(total_bytes, total_bytes)
    finally:
        ended.set()
        thread.join()


def folder_bytes(folder: Path) -> int:
    """Return the bytes of the files in a folder, those that links lead to included; a file that vanishes has none."""
    total = 0
    for path in folder.glob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total


def _check_path(path: Path, revision: str | None) -> None:
    """Raise EdgespecError for a file in place of a folder, and for a revision that a folder cannot have."""
    if path.is_file():
        if path.suffix.lower() == ".gguf" and revision is None:
            return
        raise EdgespecError(
            "E_MODEL_NOT_FOUND",
            f"'{path}' is a file, not a model's folder.",
            "Give the folder with config.json and *.safetensors, or a GGUF file.",
        )
    if revision is not None:
        raise EdgespecError(
            "E_SETTING",
            f"revision '{revision}' does not apply to the folder '{path}'.",
            "Leave it out, or give the model's name in the cache.",
        )


def _missing(name: str, repository: str, revision: str | None, aliases: Mapping[str, str]) -> EdgespecError:
    meant = f"'{name}'" if name == repository else f"'{name}' stands for '{repository}', which"
    what = f"{meant} is neither a folder here nor in the local cache ({hub_cache()})."
    there = next((folder for cached, folder in cached_repositories() if cached == repository), None)
    if there is not None:
        known = sorted(path.name for kind in ("refs", "snapshots") for path in (there / kind).glob("*"))
        what = f"{meant} is in the local cache, but not at revision '{revision or 'main'}': {', '.join(known)}."
    if "/" not in repository:  # the Hub knows models by their owners
        or_else = "" if there is not None else "Give its owner too, as in Qwen/Qwen3-0.6B"
        return _not_found(name, repository, what, aliases, or_else=or_else)
    fetch = f"hf download {repository} --revision {revision}" if revision else f"hf download {repository}"
    return _not_found(name, repository, what, aliases, or_else=f"{fetch}, or `local_files_only=False`")


def _not_found(
    name: str, repository: str, what: str, aliases: Mapping[str, str], *, or_else: str = ""
) -> EdgespecError:
    near = closest(repository if name in aliases else name, [*aliases, *(name for name, _ in cached_repositories())])
    if near:
        what += f" Closest here: {', '.join(near)}."
    fix = f"{or_else}; edgespec models lists what is here." if or_else else "edgespec models lists what is here."
    return EdgespecError("E_MODEL_NOT_FOUND", what, fix)


def closest(name: str, known: list[str]) -> list[str]:
    """Return the known names that are most like this one, whatever their case and their owner's name."""

    def likeness(other: str) -> float:
        whole, ours = name.lower(), other.lower()
        tail, our_tail = whole.rpartition("/")[2], ours.rpartition("/")[2]
        return max(
            difflib.SequenceMatcher(None, whole, ours).ratio(), difflib.SequenceMatcher(None, tail, our_tail).ratio()
        )

    ranked = sorted(set(known), key=lambda other: (-likeness(other), other))
    return [other for other in ranked if likeness(other) >= CLOSE][:NUM_CLOSEST]
