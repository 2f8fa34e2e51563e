"""Attention over a part of the keys, with the logarithm of its weights' sum, so that parts can be put together.

The context before a tree is seen by all of its rows: it needs no mask, which would be rows x keys large. Only the
tree's own keys are masked. The kernels are torch's own, below `scaled_dot_product_attention`, which keeps the sums to
itself. Legend: h heads, m rows, d head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_HEAD_DIM = 256  # that flash kernels compute
MASK_WIDTH = 16  # numbers that a mask's row is padded to: CUDA's kernels want aligned rows


@dataclass(frozen=True, slots=True)
class AttentionPart:
    """What rows attend to among some keys: [1, h, m, d], and the logarithm of the weights' sum: [1, h, m]."""

    attended: Tensor
    log_sum: Tensor


def has_kernel(key_dim: int, value_dim: int) -> bool:
    """Return whether there is a kernel that tells its sums for heads of such keys and values."""
    return key_dim == value_dim <= MAX_HEAD_DIM and key_dim % 8 == 0


def attend_part(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> AttentionPart:
    """Attend to these keys and values [1, h, keys, d] alone; `mask` [m, keys] is added to the scores."""
    ops = torch.ops.aten
    if not query.is_cuda:
        attended, log_sum = ops._scaled_dot_product_flash_attention_for_cpu(
            query, keys, values, 0.0, False, attn_mask=mask, scale=scale
        )
    elif mask is None and query.dtype != torch.float32:
        attended, log_sum = ops._scaled_dot_product_flash_attention(query, keys, values, 0.0, False, scale=scale)[:2]
    else:
        bias = None if mask is None else mask.expand(1, query.shape[1], *mask.shape)
        attended, log_sum = ops._scaled_dot_product_efficient_attention(
            query, keys, values, bias, True, 0.0, False, scale=scale
        )[:2]
    return AttentionPart(attended, log_sum.narrow(2, 0, query.shape[2]))  # the sums of some kernels are padded


def joined(first: AttentionPart, second: AttentionPart) -> Tensor:
    """Return what rows attend to in both parts together: [1, h, m, d]."""
    share = torch.sigmoid(second.log_sum - first.log_sum)[..., None]  # of the second part's weights in all
    return torch.lerp(first.attended.float(), second.attended.float(), share.float()).to(first.attended.dtype)
