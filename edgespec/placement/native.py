"""Which models read the rows of trees in one native call: those whose layers stay in a processor's memory."""

from __future__ import annotations

import torch

from edgespec.model.native.trial import is_read_natively
from offload.placement import Placement
from offload.skeleton import Skeleton

# Of a layer that is not packed: products of larger ones take longer than all that torch and Python do between them
MOST_WEIGHTS = 16 << 20


def reads_natively(skeleton: Skeleton, placement: Placement, *, device: torch.device) -> bool:
    """Return whether a model of this placement is read so; its family is tried on a narrow copy."""
    is_resident = placement.is_resident and placement.experts is None
    if device.type != "cpu" or not is_resident or skeleton.model.dtype not in {torch.float32, torch.bfloat16}:
        return False
    num_weights = max(sum(parameter.numel() for parameter in layer.parameters()) for layer in skeleton.layers)
    return (bool(skeleton.packed) or num_weights <= MOST_WEIGHTS) and is_read_natively(skeleton.model.config)
