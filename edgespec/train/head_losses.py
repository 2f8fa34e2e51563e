"""Losses of a feature head: features alike, distributions alike, and steps that agree with each other.

EAGLE and HASS sum the first two over a step's rows; HASS counts the target's most probable tokens once more
(harmonised objective distillation); CORAL adds cross-step representation alignment (CSRA, section 3.1), an
InfoNCE over all rows of the batch. All means are over rows. Legend: n rows of a step that mean something, h
hidden size, m features that a query is compared with, k rows of a chunk.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from edgespec.model.row_chunks import row_chunks

TEMPERATURE = 0.07  # of CSRA: CORAL, appendix A
TOP_TOKENS = 10  # K of HASS's top-K loss

LogitsOf = Callable[[Tensor], Tensor]  # features [k, h] -> logits [k, vocab]


def regression_loss(features: Tensor, target: Tensor) -> Tensor:
    """Return the smooth L1 loss between the head's features [n, h] and the target's [n, h]."""
    return torch.nn.functional.smooth_l1_loss(features.float(), target.float())


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributionLosses:
    """The distance of the head's distributions from the target's: one loss for each step, in nats."""

    distribution: list[Tensor]  # the cross-entropy: -sum of p(x) log q(x) over all tokens x that the head knows
    top_tokens: list[Tensor]  # HASS's top-K loss: the same sum over the target's `num_top` most probable tokens


def distribution_losses(
    features: Sequence[Tensor],
    target: Tensor,
    rows: Sequence[Tensor],
    *,
    logits_of: LogitsOf,
    target_logits_of: LogitsOf | None = None,
    vocab: int,
    num_top: int = 0,
) -> DistributionLosses:
    """Return the distance of the head's distribution from the target's in each step.

    The target's logits are the head's of the target's features, unless `target_logits_of` makes them.

    `features` are the steps' [all, h], `target` the target's [all, h], and `rows` [all] bool say which count in
    a step. The target's distribution is made once for all steps; only one chunk's logits exist at a time.
    """
    sums = [target.new_zeros(2) for _ in features]
    chunks = list(row_chunks(target.shape[0], vocab))
    for chunk in chunks:
        parts = [step[chunk] for step in features]
        counted = torch.stack([step[chunk] for step in rows]).float()  # [steps, k]
        p_of = functools.partial(target_logits_of or logits_of, target[chunk])
        entropies = functools.partial(_entropies, logits_of, p_of, counted, min(num_top, vocab))
        # One chunk is small enough to keep; several are made again on the way back.
        is_kept = len(chunks) == 1 or not torch.is_grad_enabled()
        found = entropies(*parts) if is_kept else checkpoint(entropies, *parts, use_reentrant=False)
        sums = [total + part for total, part in zip(sums, found, strict=True)]
    means = [total / step.sum().clamp(min=1) for total, step in zip(sums, rows, strict=True)]
    return DistributionLosses(distribution=[mean[0] for mean in means], top_tokens=[mean[1] for mean in means])


def _entropies(
    logits_of: LogitsOf, target_logits: Callable[[], Tensor], counted: Tensor, num_top: int, *features: Tensor
) -> tuple[Tensor, ...]:
    """Return, for each step, two sums [2] over a chunk's rows that count: of all tokens, and of the top ones."""
    with torch.no_grad():
        p = target_logits().float().softmax(-1)  # [k, vocab]
        top = p.topk(num_top, -1).indices  # [k, num_top]
    sums = []
    for step, weight in zip(features, counted, strict=True):
        log_q = logits_of(step).float().log_softmax(-1)  # [k, vocab]; tokens that the head does not know have -inf
        products = -p * log_q.masked_fill(log_q == -torch.inf, 0.0)
        each = torch.stack([products.sum(-1), products.gather(-1, top).sum(-1)])  # [2, k]
        sums.append((each * weight).sum(-1))
    return tuple(sums)


def alignment_losses(
    features: Sequence[Tensor], target: Tensor, rows: Sequence[Tensor], *, chunk_bytes: int = 64 << 20
) -> list[Tensor]:
    """Return the loss of CSRA (CORAL's equation 2) for each step.

    Every feature of step t is a query. Its positives are the features of the earlier steps and of the target at
    the same row, t in all, and the loss is the mean of InfoNCE over them; it is distinguished from all features of
    the steps so far and the target's, but for itself. `features` are the steps' [all, h], `rows` [all] bool say
    which mean something; the target's rows are those of step 1. At most `chunk_bytes` of similarities at a time.
    """
    unit = [torch.nn.functional.normalize(step.float(), dim=-1) for step in (target, *features)]
    where = [step.nonzero()[:, 0] for step in (rows[0], *rows)]  # rows that mean something, of the target first
    losses = []
    for step in range(1, len(features) + 1):
        queries = unit[step][where[step]] / TEMPERATURE  # [n, h]
        positives = [(queries * unit[earlier][where[step]]).sum(-1) for earlier in range(step)]  # t times [n]
        # The query's own step comes first: which similarity is with itself is then known by its place.
        others = torch.cat([unit[step][where[step]], *(unit[i][where[i]] for i in range(step))])  # [m, h]
        num_rows = max(1, chunk_bytes // (4 * max(1, others.shape[0])))
        starts = range(0, queries.shape[0], num_rows)
        log_sums = []
        for start in starts:
            arguments = (queries[start : start + num_rows], others, start)
            is_kept = len(starts) == 1 or not torch.is_grad_enabled()
            log_sums.append(
                _log_sums(*arguments) if is_kept else checkpoint(_log_sums, *arguments, use_reentrant=False)
            )
        losses.append((torch.cat(log_sums) - torch.stack(positives).mean(0)).mean())
    return losses


def _log_sums(queries: Tensor, others: Tensor, start: int) -> Tensor:
    """Return log sums of exponentials [k] over all `others` [m, h] but the query itself; queries begin at `start`."""
    similarities = queries @ others.T  # [k, m]
    similarities.diagonal(start).fill_(-torch.inf)
    return similarities.logsumexp(-1)
