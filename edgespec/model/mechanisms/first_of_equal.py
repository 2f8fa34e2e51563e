"""The best of a row's scores: of equal ones the first, whatever else lies in memory.

An index scores many keys alike, exactly 0 where none of its heads likes one. torch's `topk` chooses among equals by
their order in memory and by their number, which differ between a tree and plain decoding. A row's ancestors lie in the
order of their positions, so that the first of equals are the same in both.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Best(NamedTuple):
    """The best scores [..., k], and where they are."""

    values: Tensor
    indices: Tensor


def best_of(scores: Tensor, most: int) -> Best:
    """Return the `most` best of scores [..., n]; rows whose last choice is hidden come as `topk` has them."""
    values, indices = scores.topk(most, -1)
    if most in (0, scores.shape[-1]):
        return Best(values, indices)
    last = values[..., -1:]
    is_unsure = ((scores >= last).sum(-1) > most) & (last[..., 0] > torch.finfo(scores.dtype).min / 2)
    if is_unsure.any():
        rows, bounds = scores[is_unsure], last[is_unsure]
        is_better, is_equal = rows > bounds, rows == bounds
        num_free = most - is_better.sum(-1, keepdim=True)
        chosen = is_better | (is_equal & (is_equal.cumsum(-1, dtype=torch.int32) <= num_free))
        places = chosen.nonzero()[:, 1].unflatten(0, (-1, most))
        indices[is_unsure], values[is_unsure] = places, rows.gather(-1, places)
    return Best(values, indices)


class FirstOfEqual(TorchFunctionMode):
    """Within this block, `topk` of the last dimension takes the first of equal scores."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, or choose in its place."""
        named = kwargs or {}
        if func is not Tensor.topk or named.get("dim", -1) != -1 or len(args) != 2:
            return func(*args, **named)
        return best_of(*args)
