"""Hugging Face's local cache: which models are in it, and where. Asks no network; huggingface_hub loads when needed."""

from collections.abc import Iterator
from pathlib import Path

CACHED_PREFIX = "models--"


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
            yield repository_of(path), path


def repository_of(cached: Path) -> str:
    """Return the name of the model that a folder of the cache holds."""
    return cached.name.removeprefix(CACHED_PREFIX).replace("--", "/")


def find_cached(repository: str, *, revision: str | None = None, cache: Path | None = None) -> Path | None:
    """Return a model's snapshot in the local cache, whole or not; None where there is none. Asks no network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        # The config alone says that there is a model: what else is missing of it is told where it is read.
        return Path(
            snapshot_download(
                repository, revision=revision, cache_dir=cache, local_files_only=True, allow_patterns=["config.json"]
            )
        )
    except LocalEntryNotFoundError as error:
        found = getattr(error, "snapshot_path", None)  # of one that lacks even that; older versions do not tell
        return Path(found) if found else None
    except HFValidationError:
        return None


def folder_bytes(folder: Path) -> int:
    """Return the bytes of the files in a folder, those that links lead to included; a file that vanishes has none."""
    total = 0
    for path in folder.glob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total
