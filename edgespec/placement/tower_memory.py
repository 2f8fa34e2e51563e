"""The memory of a tower for pictures: that of one block at a time, and of a picture's rows in it."""

from __future__ import annotations

from typing import Any

import torch

from edgespec.model.sight import MOST_KEPT_BYTES, MOST_RUN_BYTES, PICTURE_ROWS
from edgespec.placement.run_config import RunConfig
from offload.allocated import allocated_bytes
from offload.skeleton import Skeleton

TOWER = "tower for pictures"  # the plan's use
NUM_COPIES = 6  # of a row's hidden state that a block holds: its input, queries, keys, values, sums
SEEN_ROWS = 2048  # of each text's prompt that are kept as the tower embedded them


def tower_memory(target: Skeleton, run_config: RunConfig) -> dict[str, int]:
    """Return what pictures need of the device while the tower is read block by block; nothing where none is there."""
    if target.tower is None:
        return {}
    config: Any = target.model.config
    dtype, width = run_config.dtype, int(config.get_text_config(decoder=True).hidden_size)
    num_rows = run_config.num_texts * min(run_config.prompt_tokens, SEEN_ROWS)
    tower = getattr(config, "vision_config", None)  # Fuyu's layers are in its config.json itself
    num_kinds = 1 + len(getattr(tower, "deepstack_visual_indexes", None) or ())  # of what a row has
    # What is kept, and of the texts that begin together once more, until each has taken its own
    seen_bytes = MOST_KEPT_BYTES + MOST_RUN_BYTES + 2 * num_rows * num_kinds * width * dtype.itemsize
    return {TOWER: allocated_bytes(target.tower.streamed_bytes) + _pass_bytes(tower, dtype) + seen_bytes}


def keeps_tower(target: Skeleton, free_bytes: int) -> bool:
    """Return whether all of a tower fits into what a plan has left beside one block, while pictures wait."""
    tower = target.tower
    return tower is not None and tower.num_bytes - tower.streamed_bytes <= free_bytes


def _pass_bytes(tower: Any, dtype: torch.dtype) -> int:
    hidden, inner = (int(getattr(tower, name, 0) or 0) for name in ("hidden_size", "intermediate_size"))
    return PICTURE_ROWS * (NUM_COPIES * hidden + inner) * dtype.itemsize
