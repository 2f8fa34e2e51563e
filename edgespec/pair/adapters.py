"""Adapters that a model was given: names, by which texts choose them, and scales for texts that choose none."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from edgespec.errors import EdgespecError, offload_errors
from edgespec.pair.fingerprint import weights_digest
from edgespec.validation import shown
from offload.adapters.adapter import Adapter
from offload.adapters.peft_folder import read_peft_folder
from offload.adapters.use import AdapterUse
from offload.checkpoint import Checkpoint

# FOLDER, FOLDER:SCALE or NAME=FOLDER:SCALE, or a folder and its scale
AdapterSpec: TypeAlias = str | Path | tuple[str | Path, float]
# Of a text: names, with or without their scales
AdapterChoice: TypeAlias = Mapping[str, float] | Sequence[str | tuple[str, float]]

SCALED = re.compile(r"(.+):([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)")
NAMED = re.compile(r"([^=/\\]+)=(.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenAdapter:
    """One adapter of a model."""

    name: str
    adapter: Adapter
    scale: float = 1.0  # for texts that choose no adapters; 0: it is for those alone that name it
    digest: str = field(init=False)  # of its tensors, and of what its config says of them

    def __post_init__(self) -> None:
        """Find the digest, once the files are checked."""
        checkpoint = Checkpoint(folder=self.adapter.path, tensors=self.adapter.entries)
        whole = json.dumps([self.adapter.settings, weights_digest(checkpoint)])
        object.__setattr__(self, "digest", hashlib.sha256(whole.encode()).hexdigest()[:16])


def open_adapters(specs: Iterable[AdapterSpec]) -> tuple[GivenAdapter, ...]:
    """Read and check adapters' configs and headers; raises EdgespecError for one that cannot be used, by its name."""
    if isinstance(specs, str | Path):
        specs = [specs]
    found: dict[str, GivenAdapter] = {}
    for spec in specs:
        name, path, scale = _parsed(spec)
        if not path.exists():
            what = f"there is no adapter '{path}'."
            raise EdgespecError("E_MODEL_NOT_FOUND", what, "Give the folder that peft saved.")
        with offload_errors():
            adapter = read_peft_folder(path)
        name = name or path.resolve().name
        if name in found:
            what = f"two adapters have the name '{name}': '{found[name].adapter.path}' and '{path}'."
            raise EdgespecError("E_ADAPTER", what, "Give one of them another name: `NAME=FOLDER`.")
        found[name] = GivenAdapter(name=name, adapter=adapter, scale=scale)
    return tuple(found.values())


def _parsed(spec: AdapterSpec) -> tuple[str | None, Path, float]:
    """Return an adapter's name, where it is given, its path and its scale."""
    if isinstance(spec, tuple):
        (path, scale) = spec
        return None, Path(path), _finite(spec, scale)
    if not isinstance(spec, str | Path):
        raise EdgespecError("E_ADAPTER", f"{shown(spec)} is no adapter.", "Give a folder, or FOLDER:SCALE.")
    text, name, scale = str(spec), None, 1.0
    if Path(text).exists():
        return None, Path(text), 1.0
    if (named := NAMED.fullmatch(text)) is not None:
        name, text = named.groups()
    if not Path(text).exists() and (scaled := SCALED.fullmatch(text)) is not None:
        text, scale = scaled[1], _finite(spec, float(scaled[2]))
    return name, Path(text), scale


def _finite(spec: object, scale: object) -> float:
    if not isinstance(scale, int | float) or isinstance(scale, bool) or not math.isfinite(scale):
        raise EdgespecError("E_ADAPTER", f"{shown(scale)} is no scale of an adapter ({shown(spec)}).", "Give a number.")
    return float(scale)


def default_use(given: Sequence[GivenAdapter]) -> AdapterUse:
    """Return the adapters of texts that choose none: all with a scale, in their order."""
    return tuple((one.name, one.scale) for one in given if one.scale)


def chosen_use(given: Sequence[GivenAdapter], choice: AdapterChoice | None) -> AdapterUse:
    """Return the adapters that a text chooses, in its order; None chooses those with a scale, an empty list none.

    A name without a scale has that which the adapter was given with, or 1. Raises EdgespecError for an unknown name.
    """
    if choice is None:
        return default_use(given)
    if isinstance(choice, str):
        choice = [choice]
    scales = {one.name: one.scale or 1.0 for one in given}
    pairs = choice.items() if isinstance(choice, Mapping) else [(o, None) if isinstance(o, str) else o for o in choice]
    found: dict[str, float] = {}
    for name, scale in pairs:
        if name not in scales:
            known = f"The engine has: {', '.join(scales)}." if scales else "The engine was given none."
            raise EdgespecError("E_ADAPTER", f"there is no adapter {shown(name)}.", known)
        if name in found:
            raise EdgespecError("E_ADAPTER", f"the adapter '{name}' is chosen twice.", "Choose it once, with a scale.")
        found[name] = scales[name] if scale is None else _finite(name, scale)
    return tuple((name, scale) for name, scale in found.items() if scale)


def use_digest(given: Sequence[GivenAdapter], use: AdapterUse) -> list[list[str | float]]:
    """Return what texts with these adapters depend on beside their model: contents and scales, in order."""
    digests = {one.name: one.digest for one in given}
    return [[digests[name], scale] for name, scale in use]
