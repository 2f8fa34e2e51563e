"""The folder or the GGUF file of what people call a model: a path, an alias, or a name of a local cache.

Caches are Hugging Face's and Ollama's. Only `download` reaches for the network, where somebody asked for it.
"""

import difflib
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from edgespec.errors import EdgespecError
from edgespec.hub.cache import CACHED_PREFIX, cached_repositories, find_cached, hub_cache, repository_of
from edgespec.hub.download import Progress, download
from edgespec.hub.gguf_models import CACHE_DEPTH, file_meant, split_tag
from edgespec.hub.ollama import PREFIX as OLLAMA
from edgespec.hub.ollama import name_of_blob, resolve_ollama
from offload.gguf.files import is_gguf

NUM_CLOSEST = 3
CLOSE = 0.55  # of difflib's likeness: 'Qwen3-8b' is close to 'Qwen/Qwen3-8B', 'gpt2' is not
REPOSITORY = re.compile(r"\w[\w.-]{0,95}(/\w[\w.-]{0,95})?", re.ASCII)
BUILT_IN_HEAD = "built-in-head"  # a feature head of the built-in target
BUILT_IN_TARGET = Path(__file__).parents[1] / "demo" / "target"
MTP = Path("mtp")  # a draft's name that means the target's own multi-token-prediction layer
NO_DRAFT = Path("none")  # and one that means that there is none
AUTO = Path("auto")  # and one that means whatever is at hand
SELF = {Path("self"): "auto", Path("self:nf4"): "nf4", Path("self:int4"): "int4"}  # its own copy: name -> format
WORDS = (MTP, NO_DRAFT, AUTO, *SELF)
BUILT_IN_HEAD_FOLDER = Path(__file__).parents[1] / "demo" / "head"


def resolve_model(
    name: str,
    *,
    revision: str | None = None,
    aliases: Mapping[str, str] | None = None,
    online: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Return the folder or GGUF file that `name` means; raises EdgespecError with the closest names for none.

    The words for drafts come first, then paths, the built-in head, an alias, Ollama's models after `ollama:`, and the
    local cache. A type behind a colon chooses among GGUF files, an alias's too. With `online`, what the cache lacks of
    a model is downloaded into it.
    """
    if not name.strip():
        raise EdgespecError("E_MODEL_NOT_FOUND", "the model's name is empty.", "Give a folder or a name.")
    path = local_path(name)
    if path.name.startswith(CACHED_PREFIX) and (path / "snapshots").is_dir():
        found = find_cached(repository_of(path), revision=revision, cache=path.parent)
        if found is not None:
            return _model_in(found, None, depth=CACHE_DEPTH)
    if name in map(str, WORDS):
        _check_path(path, revision)
        return path
    if is_there(path):
        _check_path(path, revision)
        return _model_in(path.absolute() if path in WORDS else path, None)
    if name.startswith("self:"):
        what = f"'{name}' is no format of the target's own copy."
        raise EdgespecError("E_MODEL_NOT_FOUND", what, f"Use one of: {', '.join(map(str, SELF))}.")
    if name == BUILT_IN_HEAD:
        _check_path(BUILT_IN_HEAD_FOLDER, revision)
        return BUILT_IN_HEAD_FOLDER
    known = dict(aliases or {})
    alias = alias_in(name, known)
    meant = name if alias is None else _of_type(known[alias], name[len(alias) + 1 :])
    if meant != name and (is_there(local_path(meant)) or meant.startswith(OLLAMA)):
        return resolve_model(meant, revision=revision)
    if meant.startswith(OLLAMA):
        _check_path(found := resolve_ollama(meant), revision)
        return found
    base, tag = split_tag(meant)
    if tag is not None and is_there(local_path(base)):
        _check_path(local_path(base), revision)
        return _model_in(local_path(base), tag)
    if not REPOSITORY.fullmatch(base):
        raise _not_found(name, meant, f"there is no folder '{meant}'.", known)
    if online:
        return _model_in(download(base, revision=revision, tag=tag, progress=progress), tag, depth=CACHE_DEPTH)
    folder = find_cached(base, revision=revision)
    if folder is None:
        raise _missing(base if meant == name else name, base, revision, known, tag)
    return _model_in(folder, tag, depth=CACHE_DEPTH)


def resolve_drafts(
    names: str,
    *,
    revision: str | None = None,
    aliases: Mapping[str, str] | None = None,
    online: bool = False,
    progress: Progress | None = None,
) -> tuple[Path, ...]:
    """Return what the names of a list mean, which commas part; a path that is there is one name, whatever is in it.

    Raises EdgespecError as `resolve_model` does, and for a revision of several.
    """
    parts = [names] if is_there(local_path(names)) else [name.strip() for name in names.split(",")]
    if revision is not None and len(parts) > 1:
        raise EdgespecError(
            "E_SETTING", f"revision '{revision}' is of one draft, and there are {len(parts)}.", "Name one."
        )
    found = (
        resolve_model(name, revision=revision, aliases=aliases, online=online, progress=progress) for name in parts
    )
    return tuple(dict.fromkeys(found))


def alias_in(name: str, aliases: Collection[str]) -> str | None:
    """Return the alias that a name is, or has before a type; None where there is a folder of this name."""
    base, _ = split_tag(name)
    alias = next((each for each in (name, base) if each in aliases), None)
    return None if alias is None or is_there(local_path(alias)) else alias


def _of_type(model: str, tag: str) -> str:
    """Return what an alias stands for, of another type where one was named."""
    start = OLLAMA if model.startswith(OLLAMA) else ""
    return f"{start}{split_tag(model.removeprefix(start))[0]}:{tag}" if tag else model


def _model_in(path: Path, tag: str | None, *, depth: int = 0) -> Path:
    """Return a folder of safetensors, or the GGUF file that it means; raises EdgespecError."""
    is_folder = path.is_dir()
    if is_folder and (tag is not None or not any(path.glob("*.safetensors*"))):
        found = file_meant(path, tag, depth=depth)
        if found is not None:
            return found
    if tag is not None:
        what = f"'{path}' holds no GGUF file" if is_folder else f"'{path}' is a file, which has one type"
        raise EdgespecError("E_MODEL_NOT_FOUND", f"{what}: '{tag}' cannot be chosen.", f"Leave out ':{tag}'.")
    return path


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


def short_name(folder: Path) -> str:
    """Return what people call a model: a snapshot in a cache by its name there, others by their own name."""
    whole = folder.absolute()  # '.' has no name of its own
    if whole.parent.name == "snapshots" and whole.parent.parent.name.startswith(CACHED_PREFIX):
        return repository_of(whole.parent.parent)
    return name_of_blob(whole) or whole.name


def _check_path(path: Path, revision: str | None) -> None:
    """Raise EdgespecError for a file in place of a folder, and for a revision that a folder cannot have."""
    if path.is_file() and not is_gguf(path):
        fix = "Give the folder with config.json and *.safetensors, or a GGUF file."
        raise EdgespecError("E_MODEL_NOT_FOUND", f"'{path}' is a file, not a model's folder.", fix)
    if revision is not None:
        what = f"revision '{revision}' does not apply to the {'file' if path.is_file() else 'folder'} '{path}'."
        raise EdgespecError("E_SETTING", what, "Leave it out, or give the model's name in the cache.")


def _missing(
    name: str, repository: str, revision: str | None, aliases: Mapping[str, str], tag: str | None
) -> EdgespecError:
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
    if tag is not None:
        fetch = fetch.replace(f"hf download {repository}", f"hf download {repository} --include '*{tag}*.gguf'")
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
