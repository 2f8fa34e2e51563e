"""Rounding of weights to numbers in blocks that share a scale: some rows at a time, by the best of several tries."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from offload.formats.storage import WEIGHTS_AT_ONCE, rows_at_once


def rounded_in_shares(weight: Tensor, round_rows: Callable[[Tensor], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Return what `round_rows` makes of rows [r, i], for a weight [..., r, i]; temporaries are those of few rows."""
    num_rows = rows_at_once(WEIGHTS_AT_ONCE, weight.shape[-1])
    shares = [round_rows(share) for share in weight.flatten(0, -2).split(num_rows)]
    return tuple(torch.cat(found).unflatten(0, weight.shape[:-1]) for found in zip(*shares, strict=True))


def least_loss(tries: Iterable[tuple[Tensor, ...]]) -> list[Tensor]:
    """Return the tensors of the try with the least loss, block by block.

    A try is a loss [..., 1] and its tensors [..., n]. They are zeros where no try's loss is a number.
    """
    best: list[Tensor] = []
    for loss, *found in tries:
        best = best or [torch.full_like(loss, math.inf), *map(torch.zeros_like, found)]
        is_better = loss < best[0]
        best = [torch.where(is_better, new, old) for new, old in zip((loss, *found), best, strict=True)]
    return best[1:]


def nearest_zeros(numbers: Tensor, zeros: Tensor, scale: Tensor, *, middle: int) -> Tensor:
    """Return what is added to (number - middle) * scale, [..., G], so that a group's mean survives its scale in bf16.

    Weights are (number - zero) * scale; numbers are [..., i], their groups neighbours.
    """
    num_groups = scale.shape[-1]
    sums = numbers.unflatten(-1, (num_groups, -1)).sum(-1, dtype=torch.int32)
    mean = sums / (numbers.shape[-1] // num_groups)
    found: Tensor = (mean - zeros) * scale - (mean - middle) * scale.to(torch.bfloat16).float()
    return found
