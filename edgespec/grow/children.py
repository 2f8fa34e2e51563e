"""The best children of every node of a layer: of q, or of q under the text's own noise.

With noise g the target draws argmax(log p + g), so that a draft which knows g proposes the largest of log q + g:
the best of q' = softmax(log q + g), which every policy of chosen children takes in place of q.
"""

from __future__ import annotations

from torch import Tensor


def under_noise(q: Tensor, noise: Tensor) -> Tensor:
    """Return q' [k, vocab] of q [k, vocab], for noise e^g [vocab]."""
    weights = q * noise.to(q.dtype)
    return weights.div_(weights.sum(-1, keepdim=True))


def best_children(q: Tensor, count: int, noise: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the `count` best tokens of each row of q [k, vocab], and what they are valued by: q, or q' with noise.

    Both are [k, c], the best first; c is smaller where the vocabulary is.
    """
    best = (q if noise is None else under_noise(q, noise)).topk(min(count, q.shape[1]), -1)
    return best.indices, best.values
