"""Where models lie on this machine: Hugging Face's cache, given folders, and the folders of other programs."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from edgespec.hub.adapter_names import ADAPTER_CONFIG
from edgespec.hub.cache import cached_repositories, find_cached, folder_bytes
from edgespec.hub.gguf_models import CACHE_DEPTH, GgufModel, fitting_models, gguf_files, read_models
from edgespec.hub.ollama import ollama_models
from edgespec.hub.other_programs import program_folders
from offload.errors import OffloadError
from offload.gguf.files import is_gguf, parts_of

SEARCH_DEPTH = 2  # of folders below one that was given
DEPTH_BESIDE = 1  # and below one that a model lies in

Found = Callable[[Sequence[Path]], Iterable[GgufModel]]  # what GGUF files are, by their headers or their names alone


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
        yield from ((str(place), place) for place in _model_folders(folder, SEARCH_DEPTH, found))


def places_beside(paths: Iterable[Path], *, found: Found = read_models) -> Iterator[tuple[str, Path]]:
    """Yield names and places of what lies in the same folders as some models, and in folders there; not their own."""
    own = {path.resolve() for path in paths}
    # What lies beside a snapshot of the cache are other revisions of it; beside a blob, other models' parts.
    apart = {"snapshots", "blobs"}
    for parent in sorted({path.absolute().parent for path in paths}):
        if parent.name not in apart:
            beside = _model_folders(parent, DEPTH_BESIDE, found)
            yield from ((str(place), place) for place in beside if place.resolve() not in own)


def program_places(*, found: Found = read_models) -> Iterator[tuple[str, Path]]:
    """Yield names and places of other programs' models; of Ollama's the manifest."""
    for _, folder, depth in program_folders():
        files = list(gguf_files(folder, depth=depth))
        yield from ((str(model.path), model.path) for model in found(files))
    yield from {name: manifest for name, _, manifest in ollama_models()}.items()


def is_adapter(folder: Path) -> bool:
    """Return whether a folder is an adapter that peft saved, and no model."""
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file()


def cached_adapters() -> Iterator[tuple[str, Path]]:
    """Yield names and folders of the adapters in the local cache."""
    for repository, _ in cached_repositories():
        folder = find_cached(repository)
        if folder is not None and is_adapter(folder):
            yield repository, folder


def adapter_places(folders: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    """Yield names and folders of the adapters in the local cache, in the given folders, and some levels below those."""
    yield from cached_adapters()
    for folder in folders:
        yield from ((str(place), place) for place in _adapter_folders(folder, SEARCH_DEPTH))


def _adapter_folders(folder: Path, depth: int) -> Iterator[Path]:
    try:
        if is_adapter(folder):
            yield folder
            return
        below = sorted(folder.iterdir()) if depth > 0 and folder.is_dir() else []
    except OSError:  # somebody else's
        return
    for path in below:
        if path.is_dir():
            yield from _adapter_folders(path, depth - 1)


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


def _model_folders(folder: Path, depth: int, found: Found) -> Iterator[Path]:
    try:
        if is_gguf(folder):
            yield folder
            return
        is_model = (folder / "config.json").exists() and (
            any(folder.glob("*.safetensors*")) or not any(gguf_files(folder))
        )
        below = sorted(folder.iterdir()) if depth > 0 and not is_model and folder.is_dir() else []
    except OSError:  # somebody else's
        return
    if is_model:
        yield folder
    yield from (model.path for model in found(list(gguf_files(folder))))
    for path in below:
        if path.is_dir():
            yield from _model_folders(path, depth - 1, found)
