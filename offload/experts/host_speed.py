"""The speed of experts that the host computes where they lie, measured by the products that it would make."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from offload.experts.expert_group import ExpertGroup
from offload.experts.mixture import products

MEASURED_BYTES = 256 << 20  # of experts, one after the other: more than a processor's own caches hold
MANY_ROWS = 32  # whose arithmetic takes longer than reading the weights
MANY_EXPERTS = 4

Stored = Mapping[str, Sequence[Tensor]]  # an expert's tensors, in pieces


def host_speed(group: ExpertGroup, stored: Sequence[Stored], scratch: Tensor) -> tuple[float, float]:
    """Return the bytes of experts that the host computes with in a second, as stored, and its operations a second.

    `stored` are experts of the group, as many different ones as there are; `scratch` is on the host.
    """
    few = stored[: max(1, MEASURED_BYTES // group.expert_stored_bytes)]
    _seconds(group, few[:1], scratch, rows=MANY_ROWS)  # the first products start torch's threads
    one_row_s = _seconds(group, few, scratch, rows=1) / len(few)
    many_rows_s = _seconds(group, stored[:MANY_EXPERTS], scratch, rows=MANY_ROWS) / len(stored[:MANY_EXPERTS])
    return group.expert_stored_bytes / one_row_s, MANY_ROWS * group.row_flops / many_rows_s


def _seconds(group: ExpertGroup, stored: Sequence[Stored], scratch: Tensor, *, rows: int) -> float:
    inputs = [
        torch.ones(rows, matrix.shape[1] if matrix.in_blocks else matrix.shape[0], dtype=scratch.dtype)
        for matrix in group.matrices
    ]
    started = time.perf_counter()
    for expert in stored:
        weights = group.weights(expert, scratch)
        for matrix, rows_in in zip(group.matrices, inputs, strict=True):
            products(weights[matrix.attribute], rows_in)
    return time.perf_counter() - started
