"""Every weight of a model as the engine computes with it, whatever it is stored as."""

from pathlib import Path

import torch
from torch import Tensor

from edgespec.pair.folder import ModelFolder, open_model
from offload.layer_store import LayerStore
from offload.packed_weight import PackedWeight


def weights(path: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Every weight of a file as the engine computes with it."""
    return weights_of(open_model(path), dtype)


def weights_of(model: ModelFolder, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The same of a model that is open, or of a draft."""
    skeleton = model.skeleton(model.checkpoint, dtype=dtype)
    records = (*skeleton.records, skeleton.outside)
    store = LayerStore({entry.file for record in records for entry in record.entries})
    found: dict[str, Tensor] = {}
    for record in records:
        flat = torch.empty(record.flat_bytes, dtype=torch.uint8)
        store.copy(record, flat)
        found |= record.flat_views(flat)
    for name, packed in [pair for pair in skeleton.model.named_modules() if isinstance(pair[1], PackedWeight)]:
        parts = {part: found.pop(f"{name}.{part}") for part in packed._parameters}
        found[name.removesuffix("_packed")] = packed.packing.unpack(parts, torch.empty(packed.shape, dtype=dtype))
    return found | {name: found[source] for name, source in skeleton.ties.items()}
