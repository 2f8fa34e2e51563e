"""The memory of a tower for pictures: that of one block at a time, and of a picture's rows in it."""

from __future__ import annotations

import torch

from offload.allocated import allocated_bytes
from offload.skeleton import Skeleton

TOWER = "tower for pictures"  # the plan's use
PICTURE_ROWS = 4096  # patches of the pictures of a prompt that pass a tower at once
NUM_COPIES = 6  # of a row's hidden state that a block holds: its input, queries, keys, values, sums
SEEN_BYTES = 64 << 20  # of what towers said of pictures, and of embedded rows of prompts


def tower_memory(target: Skeleton, dtype: torch.dtype) -> dict[str, int]:
    """Return what pictures need of the device while the tower is read block by block; nothing where none is there."""
    if target.tower is None:
        return {}
    return {TOWER: allocated_bytes(target.tower.streamed_bytes) + _pass_bytes(target, dtype) + SEEN_BYTES}


def keeps_tower(target: Skeleton, free_bytes: int) -> bool:
    """Return whether all of a tower fits into what a plan has left beside one block, while pictures wait."""
    tower = target.tower
    return tower is not None and tower.num_bytes - tower.streamed_bytes <= free_bytes


def _pass_bytes(target: Skeleton, dtype: torch.dtype) -> int:
    tower = getattr(target.model.config, "vision_config", None)
    hidden, inner = (int(getattr(tower, name, 0) or 0) for name in ("hidden_size", "intermediate_size"))
    return PICTURE_ROWS * (NUM_COPIES * hidden + inner) * dtype.itemsize
