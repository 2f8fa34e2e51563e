"""The adapters on this machine: on which base each was trained, and whether it can be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edgespec.errors import EdgespecError, offload_errors
from edgespec.hub.places import adapter_places, bytes_at
from offload.adapters.gguf import read_gguf_adapter
from offload.adapters.peft_folder import read_peft_folder
from offload.gguf.files import is_gguf


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalAdapter:
    """A folder that peft saved, or a GGUF file."""

    name: str  # as `adapters` takes it
    folder: Path
    num_bytes: int
    base: str | None = None  # the name of the model that it was trained on
    num_modules: int = 0  # that it adds to, or has parameters of
    problem: EdgespecError | None = None  # why it cannot be read


def local_adapters(folders: Sequence[Path]) -> list[LocalAdapter]:
    """Return the adapters in the local cache and in folders, by their configs and headers alone."""
    return [inspect_adapter(name, folder) for name, folder in adapter_places(folders)]


def inspect_adapter(name: str, folder: Path) -> LocalAdapter:
    """Return what can be known of an adapter without its base, including what is wrong with it."""
    num_bytes = bytes_at(folder)
    try:
        with offload_errors():
            found = read_gguf_adapter(folder, None) if is_gguf(folder) else read_peft_folder(folder)
    except EdgespecError as error:
        return LocalAdapter(name=name, folder=folder, num_bytes=num_bytes, problem=error)
    modules = {*found.deltas, *(parameter.rpartition(".")[0] for parameter in found.replaced)}
    return LocalAdapter(name=name, folder=folder, num_bytes=num_bytes, base=found.base, num_modules=len(modules))
