"""Which models read the rows of trees in one native call: those whose layers stay in a processor's memory."""

from __future__ import annotations

import torch

from edgespec.draft.own_parts import lent_layers
from edgespec.model.native.trial import is_read_natively
from edgespec.placement.run_config import RunConfig
from offload.native.compiler import is_available
from offload.native.threads import most_threads
from offload.placement import Placement
from offload.skeleton import Skeleton

# Of a layer that is not packed: products of larger ones take longer than all that torch and Python do between them
MOST_WEIGHTS = 16 << 20


def reads_natively(skeleton: Skeleton, placement: Placement, *, device: torch.device) -> bool:
    """Return whether a model of this placement is read so; its family is tried on a narrow copy."""
    is_resident = placement.is_resident and placement.experts is None
    return is_resident and _may_be_read(skeleton, device) and is_read_natively(skeleton.model.config)


def _may_be_read(skeleton: Skeleton, device: torch.device) -> bool:
    if device.type != "cpu" or skeleton.model.dtype not in {torch.float32, torch.bfloat16}:
        return False
    if lent_layers(skeleton.model):  # whose rows attend another model's keys
        return False
    num_weights = max(sum(parameter.numel() for parameter in layer.parameters()) for layer in skeleton.layers)
    return bool(skeleton.packed) or num_weights <= MOST_WEIGHTS


def native_memory(skeleton: Skeleton, run_config: RunConfig, *, tree_rows: int, budget_bytes: int | None) -> int:
    """Return the bytes that such passes hold, where a model may be read so: if its layers stay within the budget.

    Its family is not tried for that.
    """
    layers_bytes = sum(record.cpu_bytes for record in skeleton.records)
    fits = budget_bytes is None or layers_bytes <= budget_bytes
    if not fits or not is_available() or not _may_be_read(skeleton, run_config.device):
        return 0
    from edgespec.model.native.workspace import MOST_ROWS, planned_bytes  # needs llvmlite

    rows = run_config.num_texts * max(tree_rows, min(run_config.prompt_tokens, MOST_ROWS))
    config = skeleton.model.config.get_text_config(decoder=True)
    keys = run_config.context_tokens + tree_rows
    return planned_bytes(config, num_rows=rows, num_keys=keys, max_path=tree_rows, num_threads=most_threads())
