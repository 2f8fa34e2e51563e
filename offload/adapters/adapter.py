"""An adapter as its files have it: the places of its tensors, and what its config says of them.

Legend: r the rank, i and o a module's columns and rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from offload.checkpoint import TensorEntry
from offload.errors import read_errors


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What an adapter adds to one module, times its scale."""

    down: TensorEntry  # [r, i]; of an embedding [r, vocab]
    up: TensorEntry  # [o, r]
    scale: float
    up_bias: TensorEntry | None = None  # [o]
    magnitude: TensorEntry | None = None  # [o], of DoRA
    is_embedding: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """An adapter's tensors by the modules and parameters that its file names."""

    path: Path
    settings: str  # what was read of its config, as JSON
    deltas: Mapping[str, Delta]  # by module
    replaced: Mapping[str, TensorEntry]  # by parameter, in whose place they stand
    tables: Mapping[str, TensorEntry]  # by parameter: stored beside an adapter of an embedding, trained or not
    base: str | None = None  # the name of the model that it was trained on

    @property
    def entries(self) -> dict[str, TensorEntry]:
        """All tensors by their names in the file."""
        found = [*self.replaced.values(), *self.tables.values()]
        for delta in self.deltas.values():
            found += [one for one in (delta.down, delta.up, delta.up_bias, delta.magnitude) if one is not None]
        return {entry.name: entry for entry in found}


def read_tensor(entry: TensorEntry) -> Tensor:
    """Return a tensor's numbers, those that are computed in float32; raises OffloadError."""
    with read_errors(), entry.file.open("rb") as file:
        file.seek(entry.offset)
        stored = bytearray(file.read(entry.num_bytes))
    if len(stored) < entry.num_bytes:
        raise OSError(f"'{entry.file}' ends before '{entry.name}' does")
    if entry.computed is None:
        return torch.frombuffer(stored, dtype=entry.dtype).view(entry.shape)
    out = torch.empty(entry.parameter_shape)
    entry.computed.write(torch.frombuffer(stored, dtype=torch.uint8), out.view(-1))
    return out
