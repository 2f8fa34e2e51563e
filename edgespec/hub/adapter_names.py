"""Adapters by what people write: FOLDER_OR_GGUF, with a name of one's own before it, and a scale behind it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from edgespec.errors import EdgespecError
from edgespec.hub.cache import find_cached
from edgespec.hub.names import REPOSITORY, is_there, local_path, short_name
from edgespec.validation import shown
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


def own_name(path: Path) -> str:
    """Return what texts call an adapter that was given no name: its folder's, or its file's without the ending."""
    name = short_name(path.resolve() if not is_gguf(path) else path)
    return Path(name).stem if is_gguf(path) else name
