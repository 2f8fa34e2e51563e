"""Logits become the distribution that tokens are sampled from; verification uses the same one.

Shapes: n rows of one token position each. The order of the filters is transformers' own:
temperature, top-k, top-p, min-p.
"""

import numpy as np
import torch
from torch import Tensor

from edgespec.config import DraftSampling, SamplingSettings

# Rows are filtered in chunks of about this many numbers: sorting takes several times their memory.
CHUNK_ELEMENTS = 1 << 23
NUCLEUS_TOKENS = 512  # finding these takes a fraction of the time of sorting a vocabulary
# Of the largest probability: what truncation leaves of a row mostly lies above the first
LIKELY_SHARES = (1e-3, 1e-4, 1e-5, 1e-6)
ENTROPY_TOKENS = 1000  # the tail after these is negligible (C2T, appendix C)


def to_probs(logits: Tensor, sampling: SamplingSettings) -> Tensor:
    """Return probabilities [n, vocab] of logits [n, vocab]; float32 at least, exactly one-hot at temperature 0."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if sampling.temperature == 0:
        best = logits.argmax(-1, keepdim=True)  # [n, 1]
        return torch.zeros_like(logits).scatter_(-1, best, 1.0)
    rows = max(1, CHUNK_ELEMENTS // logits.shape[-1])
    if logits.shape[0] <= rows:
        return _truncate(torch.softmax(logits / sampling.temperature, -1), sampling)
    probs = torch.empty_like(logits)
    for chunk, into in zip(logits.split(rows), probs.split(rows), strict=True):
        into.copy_(_truncate(torch.softmax(chunk / sampling.temperature, -1), sampling))
    return probs


def to_draft_probs(logits: Tensor, sampling: DraftSampling) -> Tensor:
    """Return q [n, vocab] of a draft's logits [n, vocab]; truncated tokens keep the tail share."""
    probs = to_probs(logits, sampling)
    if sampling.tail_share == 0 or not sampling.truncates:
        return probs
    whole = to_probs(logits, SamplingSettings(temperature=sampling.temperature))
    return probs.lerp_(whole, sampling.tail_share)


def _truncate(probs: Tensor, sampling: SamplingSettings) -> Tensor:
    """Apply top-k, top-p and min-p to probabilities [n, vocab]."""
    if probs.device.type == "cpu" and sampling.truncates:
        return _truncate_on_host(probs, sampling)
    vocab = probs.shape[-1]
    if 0 < sampling.top_k < vocab:
        kth_best = probs.topk(sampling.top_k, -1).values[:, -1:]
        probs = _renormalise(probs.masked_fill(probs < kth_best, 0.0))
    if sampling.top_p < 1:
        probs = _renormalise(_nucleus(probs, sampling.top_p))
    if sampling.min_p > 0:
        floor = sampling.min_p * probs.amax(-1, keepdim=True)
        probs = _renormalise(probs.masked_fill(probs < floor, 0.0))
    return probs


def _truncate_on_host(probs: Tensor, sampling: SamplingSettings) -> Tensor:
    """Apply the same row by row to the few tokens that can be left: torch's topk reads a vocabulary for longer."""
    top_k = sampling.top_k if sampling.top_k < probs.shape[-1] else 0
    kept = torch.zeros_like(probs)
    for row, into in zip(probs.detach().numpy(), kept.numpy(), strict=True):
        largest = row.max()
        if not np.isfinite(largest):  # who asked finds NaN, and says whose it is
            into[:] = row
            continue
        tokens = _may_be_left(row, largest, top_k, sampling)
        tokens = tokens[np.argsort(-row[tokens], kind="stable")]
        left = row[tokens]  # in falling order: each filter keeps the first ones
        if top_k > 0:
            left = _share(left[left >= left[top_k - 1]])
        if sampling.top_p < 1:
            mass_before = left.cumsum(dtype=np.float64) - left
            left = _share(left[: np.count_nonzero(mass_before < sampling.top_p)])
        if sampling.min_p > 0:
            left = _share(left[left >= sampling.min_p * left[0]])
        into[tokens[: left.shape[0]]] = left
    return kept


def _may_be_left(row: np.ndarray, largest: np.floating, top_k: int, sampling: SamplingSettings) -> np.ndarray:
    """Return tokens of probabilities [vocab], among which are all that truncation leaves."""
    for share in LIKELY_SHARES:
        tokens = np.flatnonzero(row >= share * largest)
        if top_k > 0:
            is_enough = tokens.shape[0] >= top_k
        elif sampling.top_p < 1:
            is_enough = row[tokens].sum() >= sampling.top_p
        else:
            is_enough = share <= sampling.min_p
        if is_enough:
            return tokens
    least = torch.from_numpy(row).topk(top_k).values[-1].item() if top_k > 0 else 0.0
    return np.flatnonzero(row >= least)


def _share(left: np.ndarray) -> np.ndarray:
    shares: np.ndarray = left / left.sum()
    return shares


def _nucleus(probs: Tensor, top_p: float) -> Tensor:
    """Keep the likeliest tokens of mass `top_p` a row of probabilities [n, vocab], and set the others to 0."""
    count = min(NUCLEUS_TOKENS, probs.shape[-1])
    kept = _likeliest(probs, *probs.topk(count, -1), top_p)
    if count < probs.shape[-1]:
        # Flat rows, whose likeliest tokens do not reach the mass: rare, and each sorted whole.
        (flat,) = (kept.sum(-1) < top_p).nonzero(as_tuple=True)
        if flat.shape[0]:
            kept[flat] = _likeliest(probs[flat], *probs[flat].sort(-1, descending=True), top_p)
    return kept


def _likeliest(probs: Tensor, ordered: Tensor, order: Tensor, top_p: float) -> Tensor:
    """Keep `probs` [n, vocab] of tokens with less than `top_p` of the mass before them; the others are 0.

    The tokens `order` [n, k] and their probabilities `ordered` [n, k] are in falling order.
    """
    mass_before = ordered.cumsum(-1) - ordered
    return torch.zeros_like(probs).scatter_(-1, order, ordered.masked_fill(mass_before >= top_p, 0.0))


def _renormalise(probs: Tensor) -> Tensor:
    return probs / probs.sum(-1, keepdim=True)


def entropy_of_top(probs: Tensor, count: int = ENTROPY_TOKENS) -> Tensor:
    """Return the entropy in nats, [n], over the `count` likeliest tokens of probabilities [n, vocab].

    Source: C2T, section 4.1.
    """
    top = probs if probs.shape[-1] <= count else probs.topk(count, -1, sorted=False).values
    entropy: Tensor = -torch.special.xlogy(top, top).sum(-1)
    return entropy
