"""Log-probabilities of the drawn tokens, in the target's own distribution.

As in OpenAI's interface, bias, penalties, grammar, temperature and truncation do not count.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from edgespec.config import MAX_LOGPROBS, require
from edgespec.to_device import on_device

ROWS_AT_ONCE = 8  # of a prompt's, in float64


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A token's log-probability, and the likeliest tokens at its place."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # the likeliest tokens and their log-probabilities, the best first


def check_num_logprobs(count: int | None) -> None:
    """Raise EdgespecError for a number of alternatives outside the range."""
    require(
        count is None or 0 <= count <= MAX_LOGPROBS,
        f"`logprobs={count}` is not in [0, {MAX_LOGPROBS}].",
        "0 is the token's own alone.",
    )


def token_logprobs(logits: Tensor, tokens: Sequence[int], count: int) -> tuple[TokenLogprob, ...]:
    """Return the log-probabilities of tokens [n], and of the `count` likeliest ones, from logits [n, vocab]."""
    if not tokens:
        return ()
    log_p = logits.double().log_softmax(-1)
    own = log_p.gather(-1, on_device(tokens, log_p.device)[:, None])[:, 0].tolist()
    best = log_p.topk(min(count, log_p.shape[1]), -1)
    tops = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return tuple(
        TokenLogprob(token=token, logprob=logprob, top=tuple(zip(ids, values, strict=True)))
        for token, logprob, (ids, values) in zip(tokens, own, tops, strict=True)
    )
