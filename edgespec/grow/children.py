"""The best children of every node of a layer: of q, or of q under the text's own noise.

With noise g the target draws argmax(log p + g), so that a draft which knows g proposes the largest of log q + g:
the best of q' = softmax(log q + g), which every policy of chosen children takes in place of q.
"""

import torch
from torch import Tensor

# Rows are worked on in chunks of about this many numbers on a CPU, whose cache then still holds them.
CHUNK_ELEMENTS = 1 << 20
BLOCK = 64  # columns that are first reduced to their largest: for 32 of 32,000, the fastest of 16 to 256
MIN_BLOCKS = 4  # for each child; with fewer it does not pay


def under_noise(q: Tensor, noise: Tensor) -> Tensor:
    """Return q' [k, vocab] of q [k, vocab], for noise e^g [vocab]."""
    weights = q * noise.to(q.dtype)
    return weights.div_(weights.sum(-1, keepdim=True))


def best_children(q: Tensor, count: int, noise: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the `count` best tokens of each row of q [k, vocab], and what they are valued by: q, or q' with noise.

    Both are [k, c], the best first; c is smaller where the vocabulary is. Noise is [vocab], or [k, vocab].
    """
    count = min(count, q.shape[1])
    weight = None if noise is None else noise.to(q.dtype)
    rows = q.shape[0] if q.is_cuda else max(1, CHUNK_ELEMENTS // q.shape[1])
    if q.shape[0] <= rows:
        return _best_of(q, count, weight)
    parts = q.split(rows)
    noises = weight.split(rows) if weight is not None and weight.ndim > 1 else [weight] * len(parts)
    best = [_best_of(some, count, of_these) for some, of_these in zip(parts, noises, strict=True)]
    tokens, values = zip(*best, strict=True)
    return torch.cat(tokens), torch.cat(values)


def _best_of(q: Tensor, count: int, noise: Tensor | None) -> tuple[Tensor, Tensor]:
    if noise is None:
        return largest(q, count)
    weights = q * noise
    tokens, values = largest(weights, count)
    return tokens, values.div_(weights.sum(-1, keepdim=True))  # q' of these alone


def largest(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the columns of the `count` largest numbers of each row [k, n], and the numbers: [k, count], largest first.

    The largest are in the `count` blocks with the largest maxima.
    """
    num_rows, num_blocks = rows.shape[0], rows.shape[1] // BLOCK
    if num_blocks < MIN_BLOCKS * count:
        found = rows.topk(count, -1)
        return found.indices, found.values
    blocks = rows[:, : num_blocks * BLOCK].view(num_rows, num_blocks, BLOCK)
    best = blocks.amax(-1).topk(count, -1, sorted=False).indices  # [k, count]
    rest = rows[:, num_blocks * BLOCK :]  # [k, less than a block]
    within = blocks[torch.arange(num_rows, device=rows.device)[:, None], best].flatten(1)  # [k, count * BLOCK]
    found = torch.cat([within, rest], 1).topk(count, -1)
    column = best.gather(1, (found.indices // BLOCK).clamp_(max=count - 1)) * BLOCK + found.indices % BLOCK
    behind = found.indices - count * BLOCK  # in `rest`, from 0 on
    return torch.where(behind < 0, column, num_blocks * BLOCK + behind), found.values
