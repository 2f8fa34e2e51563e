"""Skeletons of folders, and the logits of models that stream."""

import threading
from contextlib import ExitStack, closing
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from offload.checkpoint import Checkpoint, read_checkpoint
from offload.layouts.onednn import has_onednn, hook_linear_layers
from offload.placement import Placement, place_layers
from offload.skeleton import Skeleton, build_skeleton
from offload.streamed_model import StreamedModel

CPU = torch.device("cpu")
UNLIMITED = 1 << 40


def reader_threads() -> set[threading.Thread]:
    """Those of all streams: other tests' engines may have some, too."""
    return {thread for thread in threading.enumerate() if thread.name == "edgespec-reader"}


def skeleton_of(folder: Path, dtype: torch.dtype = torch.float32, *, checkpoint: Checkpoint | None = None) -> Skeleton:
    """The folder's skeleton, over its own weights or those of another checkpoint."""
    return build_skeleton(AutoConfig.from_pretrained(folder), checkpoint or read_checkpoint(folder), dtype=dtype)


def unlimited_placement(skeleton: Skeleton, *, resident: int | None = None) -> Placement:
    """All memory there is, for at most so many resident layers."""
    return place_layers(skeleton.records, device_memory={}, device_budget_bytes=UNLIMITED, max_resident=resident)


def logits(model: PreTrainedModel, *, rows: int = 20, passes: int = 1, ids: list[int] | None = None) -> Tensor:
    """Of the last pass: from the second on, slots are read that were used before. `ids` are first numbers otherwise.

    On a CPU a model of transformers' multiplies by oneDNN meanwhile, as models that stream do.
    """
    device = CPU if model.device.type == "meta" else model.device  # where a layer that streams comes first
    positions = torch.arange(rows if ids is None else len(ids), device=device)[None]
    tokens = positions if ids is None else torch.tensor([ids], device=device)
    with torch.no_grad(), ExitStack() as undo:
        if model.device.type == "cpu" and has_onednn(model.dtype):
            hook_linear_layers(model, model.dtype, undo)
        for _ in range(passes):
            found: Tensor = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
    return found


def streamed_logits(
    skeleton: Skeleton, placement: Placement, *, rows: int = 20, ids: list[int] | None = None
) -> Tensor:
    with closing(StreamedModel(skeleton, placement, device=CPU)) as streamed:
        return logits(streamed.model, rows=rows, passes=2, ids=ids)
