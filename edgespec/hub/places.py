"""Where models lie on this machine: Hugging Face's cache, given folders, and the folders of other programs."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from edgespec.hub.cache import cached_repositories, find_cached, folder_bytes
from edgespec.hub.gguf_models import (
    CACHE_DEPTH,
    GgufModel,
    fitting_models,
    gguf_files,
    holds_adapter,
    read_models,
)
from edgespec.hub.ollama import ollama_models
from edgespec.hub.other_programs import program_folders
from offload.errors import OffloadError
from offload.file_names import ADAPTER_NAME
from offload.gguf.files import is_gguf, parts_of

SEARCH_DEPTH = 2  # of folders below one that was given
DEPTH_BESIDE = 1  # and below one that a model lies in

Found = Callable[[Sequence[Path]], Iterable[GgufModel]]  # what GGUF files are, by their headers or their names alone
Inside = Callable[[Path], tuple[Sequence[Path], bool]]  # what a place holds, and whether folders below it hold no more


def places(folders: Sequence[Path], *, found: Found = read_models) -> Iterator[tuple[str, Path]]:
    """Yield names and places of the models in the local cache and in the given folders, folders and GGUF files alike.

    Folders some levels below those are searched too.
    """
    for repository, cached in cached_repositories():
        folder = find_cached(repository)
        if folder is not None:
            yield from _in_snapshot(repository, folder, "", found)
            continue
        # Downloaded at a revision of its own: it has to be named with `revision`.
        snapshots = sorted((cached / "snapshots").iterdir(), key=lambda path: path.stat().st_mtime)
        if snapshots:
            yield from _in_snapshot(repository, snapshots[-1], f" `revision={snapshots[-1].name}`", found)
    for folder in folders:
        yield from ((str(place), place) for place in _below(folder, SEARCH_DEPTH, _models(found)))


def places_beside(paths: Iterable[Path], *, found: Found = read_models) -> Iterator[tuple[str, Path]]:
    """Yield names and places of what lies in the same folders as some models, and in folders there; not their own."""
    own = {path.resolve() for path in paths}
    # What lies beside a snapshot of the cache are other revisions of it; beside a blob, other models' parts.
    apart = {"snapshots", "blobs"}
    for parent in sorted({path.absolute().parent for path in paths}):
        if parent.name not in apart:
            beside = _below(parent, DEPTH_BESIDE, _models(found))
            yield from ((str(place), place) for place in beside if place.resolve() not in own)


def program_places(*, found: Found = read_models) -> Iterator[tuple[str, Path]]:
    """Yield names and places of other programs' models; of Ollama's the manifest."""
    for _, folder, depth in program_folders():
        files = list(gguf_files(folder, depth=depth))
        yield from ((str(model.path), model.path) for model in found(files))
    yield from {name: manifest for name, _, manifest in ollama_models()}.items()


def is_adapter(folder: Path) -> bool:
    """Return whether a folder is an adapter that peft saved, and no model."""
    return (folder / ADAPTER_NAME).is_file() and not (folder / "config.json").is_file()


def cached_adapters() -> Iterator[tuple[str, Path]]:
    """Yield names and folders of the adapters in the local cache."""
    for repository, _ in cached_repositories():
        folder = find_cached(repository)
        if folder is not None and is_adapter(folder):
            yield repository, folder


def adapter_places(folders: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    """Yield names and places of the adapters in the local cache, in the given folders, and some levels below those.

    Folders and GGUF files alike.
    """
    yield from cached_adapters()
    for repository, _ in cached_repositories():
        snapshot = find_cached(repository)
        if snapshot is not None and not is_adapter(snapshot):
            yield from ((str(place), place) for place in _below(snapshot, CACHE_DEPTH, _adapters))
    for folder in folders:
        yield from ((str(place), place) for place in _below(folder, SEARCH_DEPTH, _adapters))


def bytes_at(place: Path) -> int:
    """Return the bytes of a folder's files, or of a GGUF file and its further parts; 0 where they cannot be read."""
    if place.is_dir():
        return folder_bytes(place)
    with contextlib.suppress(OffloadError, OSError):
        return sum(part.stat().st_size for part in parts_of(place))
    return 0


def _in_snapshot(repository: str, folder: Path, revision: str, found: Found) -> Iterator[tuple[str, Path]]:
    files = list(gguf_files(folder, depth=CACHE_DEPTH))
    if not files or any(folder.glob("*.safetensors*")):
        yield repository + revision, folder
    models = list(found(files))
    for model in models:
        is_named = fitting_models(models, model.recipe, folder) == [model]
        yield (f"{repository}:{model.recipe}{revision}" if is_named else str(model.path)), model.path


def _models(found: Found) -> Inside:
    """Return what says which models a place holds."""

    def inside(place: Path) -> tuple[Sequence[Path], bool]:
        if is_gguf(place):
            return [place], True
        is_model = (place / "config.json").exists() and (
            any(place.glob("*.safetensors*")) or not any(gguf_files(place))
        )
        files = [model.path for model in found(list(gguf_files(place)))]
        return [place, *files] if is_model else files, is_model

    return inside


def _adapters(place: Path) -> tuple[Sequence[Path], bool]:
    """Return the adapters that a place holds."""
    if is_gguf(place):
        return [place] if holds_adapter(place) else [], True
    if is_adapter(place):
        return [place], True
    return [path for path in gguf_files(place) if holds_adapter(path)], False


def _below(place: Path, depth: int, inside: Inside) -> Iterator[Path]:
    """Yield what a place holds, and what folders below it do."""
    try:
        found, is_all = inside(place)
        below = sorted(place.iterdir()) if depth > 0 and not is_all and place.is_dir() else []
    except OSError:  # somebody else's
        return
    yield from found
    for path in below:
        if path.is_dir():
            yield from _below(path, depth - 1, inside)
