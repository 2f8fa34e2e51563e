"""Adapters that a model was given: names, by which texts choose them, and scales for texts that choose none."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from transformers import PretrainedConfig

from edgespec.errors import EdgespecError, offload_errors
from edgespec.hub.adapter_names import NamedAdapter, named_adapter, own_name
from edgespec.pair.fingerprint import weights_digest
from edgespec.validation import shown
from offload.adapters.adapter import Adapter
from offload.adapters.gguf import read_gguf_adapter
from offload.adapters.peft_folder import read_peft_folder
from offload.adapters.use import AdapterUse
from offload.checkpoint import Checkpoint
from offload.gguf.files import is_gguf

# A folder, FOLDER:SCALE or NAME=FOLDER:SCALE, or a folder and its scale
AdapterSpec: TypeAlias = str | Path | tuple[str | Path, float] | NamedAdapter
# Of a text: names, with or without their scales
AdapterChoice: TypeAlias = Mapping[str, float] | Sequence[str | tuple[str, float]]


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


def open_adapters(specs: Iterable[AdapterSpec], config: PretrainedConfig) -> tuple[GivenAdapter, ...]:
    """Read and check the configs and headers of adapters for a model of this text config.

    Raises EdgespecError for one that cannot be used, by its name.
    """
    if isinstance(specs, str | Path):
        specs = [specs]
    found: dict[str, GivenAdapter] = {}
    for named in map(_named, specs):
        with offload_errors():
            is_file = is_gguf(named.path)
            adapter = read_gguf_adapter(named.path, config) if is_file else read_peft_folder(named.path)
        if named.name in found:
            what = f"two adapters have the name '{named.name}': '{found[named.name].adapter.path}' and '{named.path}'."
            raise EdgespecError("E_ADAPTER", what, "Give one of them another name: NAME=FOLDER.")
        found[named.name] = GivenAdapter(name=named.name, adapter=adapter, scale=float(named.scale))
    return tuple(found.values())


def _named(spec: AdapterSpec) -> NamedAdapter:
    """Return where an adapter is, its name and its scale; raises EdgespecError."""
    if isinstance(spec, NamedAdapter):
        return spec
    if isinstance(spec, tuple):
        (place, scale) = spec
        return NamedAdapter(path=Path(place), name=own_name(Path(place)), scale=scale)
    if not isinstance(spec, str | Path):
        raise EdgespecError("E_ADAPTER", f"{shown(spec)} is no adapter.", "Give a folder, or FOLDER:SCALE.")
    return named_adapter(str(spec))


def adapter_notes(given: Sequence[GivenAdapter], model: str) -> tuple[str, ...]:
    """Return what is to be said of a model's adapters, behind its name."""
    notes = []
    for one in given:
        scale = f" at {one.scale:g}" if one.scale not in (0, 1) else "" if one.scale else " for texts that name it"
        base = one.adapter.base or model
        is_other = base.rpartition("/")[2].lower() != model.rpartition("/")[2].lower()
        notes.append(f"has the adapter '{one.name}'{scale}" + (f", whose config names '{base}'" if is_other else ""))
    return tuple(notes)


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
        if scale is not None and not math.isfinite(scale):
            raise EdgespecError("E_ADAPTER", f"{scale} is no scale of the adapter '{name}'.", "Give a number.")
        found[name] = scales[name] if scale is None else float(scale)
    return tuple((name, scale) for name, scale in found.items() if scale)


def use_digest(given: Sequence[GivenAdapter], use: AdapterUse) -> list[list[str | float]]:
    """Return what texts with these adapters depend on beside their model: contents and scales, in order."""
    digests = {one.name: one.digest for one in given}
    return [[digests[name], scale] for name, scale in use]
