"""Adapters by what people write: FOLDER_OR_GGUF, with a name of one's own before it, and a scale behind it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from edgespec.errors import EdgespecError
from edgespec.hub.cache import find_cached
from edgespec.hub.names import REPOSITORY, is_there, local_path, short_name
from edgespec.validation import parse_json, shown
from offload.file_names import ADAPTER_NAME, INDEX_NAME, SINGLE_NAME
from offload.gguf.files import is_gguf

SCALED = re.compile(r"(.+):([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)")
NAMED = re.compile(r"([^=/\\]+)=(.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedAdapter:
    """Where an adapter is, what texts call it, and how much it counts in texts that choose none."""

    path: Path
    name: str
    scale: float = 1.0  # 0: for those texts alone that name it

    def __post_init__(self) -> None:
        """Raise EdgespecError for a scale that is no number."""
        scale: object = self.scale
        if not isinstance(scale, int | float) or isinstance(scale, bool) or not math.isfinite(scale):
            what = f"{shown(scale)} is no scale of the adapter '{self.path}'."
            raise EdgespecError("E_ADAPTER", what, "Give a number.")


def named_adapter(text: str) -> NamedAdapter:
    """Return the adapter that `[NAME=]FOLDER_OR_GGUF[:SCALE]` means, also by its name in the local cache.

    A path that is there is one, whatever is in it. Raises EdgespecError where there is none.
    """
    name, scale, place = None, 1.0, text
    if not is_there(local_path(place)) and (named := NAMED.fullmatch(place)) is not None:
        name, place = named.groups()
    if not is_there(local_path(place)) and (scaled := SCALED.fullmatch(place)) is not None:
        place, scale = scaled[1], float(scaled[2])
    path = local_path(place)
    if not is_there(path):
        cached = find_cached(place, revision=None) if REPOSITORY.fullmatch(place) else None
        if cached is None:
            what = f"there is no adapter '{place}'."
            raise EdgespecError("E_MODEL_NOT_FOUND", what, "Give the folder that peft saved, or a GGUF file.")
        path = cached
    return NamedAdapter(path=path, name=name or own_name(path), scale=scale)


def on_its_base(target: Path | None) -> tuple[Path | None, tuple[NamedAdapter, ...]]:
    """Return a target as it is; of a folder that holds an adapter alone the model that it was trained on, and it.

    That is looked for among folders, and in the local cache. Where it is not here, opening the folder says so.
    """
    if target is None or not (target / ADAPTER_NAME).is_file():
        return target, ()
    base = _base_of(target)
    has_weights = any((target / name).exists() for name in (SINGLE_NAME, INDEX_NAME))
    if base is None or has_weights:
        return target, ()
    path = local_path(base)
    found = path if path.is_dir() else find_cached(base, revision=None) if REPOSITORY.fullmatch(base) else None
    if found is None or (found / ADAPTER_NAME).exists():
        return target, ()
    return found, (NamedAdapter(path=target, name=own_name(target)),)


def _base_of(folder: Path) -> str | None:
    """Return the name that an adapter's config has for its model; None where it has none."""
    try:
        found = parse_json((folder / ADAPTER_NAME).read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) and found else None


def own_name(path: Path) -> str:
    """Return what texts call an adapter that was given no name: its folder's, or its file's without the ending."""
    name = short_name(path.resolve() if not is_gguf(path) else path)
    return Path(name).stem if is_gguf(path) else name
