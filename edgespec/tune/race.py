"""One rule for every comparison: who is left in a race, when it is decided, and who has won.

All that race are measured on the same prompts: tokens and seconds [prompts, contenders]. Prompts differ far more
than contenders do at one prompt, so differences are taken within prompts, and whole prompts are resampled
(a paired bootstrap): the steps behind one prompt share its luck.

    log speed of c = log(sum of tokens of c) - log(sum of seconds of c), over the prompts of a resample

A contender is dropped where it is slower than the leader, by more than the least gain, in `confidence` of the
resamples. Whoever is left gets the time of those who were dropped, and is looked at again when the
measurements have doubled: successive halving.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm, t

from profiles.cost import Floats

RESAMPLES = 1000  # of the prompts: the share of them that decides is then known to within a percent
PROMPTS = 8  # that a race should have time for: it is looked at behind two, four and eight


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What a race is decided by."""

    confidence: float
    least_gain: float  # relative speed that is worth a switch


@dataclass(frozen=True, slots=True, eq=False)
class Speeds:
    """Logarithms of tokens a second."""

    measured: Floats  # [contenders]
    resampled: Floats | None  # [resamples, contenders]; None of one prompt, which tells nothing about others

    @property
    def leader(self) -> int:
        """Who was the fastest."""
        return int(self.measured.argmax())


def by_prompt(values: Floats, prompts: Sequence[int]) -> Floats:
    """Sums of the rows [rows, contenders] of each prompt: [prompts, contenders]."""
    numbers, places = np.unique(np.asarray(prompts), return_inverse=True)
    sums = np.zeros((len(numbers), values.shape[1]))
    np.add.at(sums, places, values)
    return sums


def log_speeds(tokens: Floats, seconds: Floats, rule: Rule) -> Speeds:
    """Speeds of contenders, and how they vary with the prompts; both are sums [prompts, contenders].

    Resamples of few prompts vary less than few prompts do: they are stretched to the quantile of Student's t.
    """
    count = len(tokens)
    measured = np.log(tokens.sum(0)) - np.log(seconds.sum(0))
    if count < 2:
        return Speeds(measured, None)
    draws = np.random.default_rng(0).multinomial(count, [1 / count] * count, size=RESAMPLES).astype(np.float64)
    stretch = math.sqrt(count / (count - 1)) * t.ppf(rule.confidence, count - 1) / norm.ppf(rule.confidence)
    resampled = np.log(draws @ tokens) - np.log(draws @ seconds)
    return Speeds(measured, measured + stretch * (resampled - measured))


def still_racing(speeds: Speeds, rule: Rule) -> NDArray[np.intp]:
    """Places of those that are not slower than the leader, with confidence, by more than the least gain."""
    if speeds.resampled is None:
        return np.arange(len(speeds.measured))
    is_behind = _behind(speeds.resampled, speeds.leader) > np.log1p(rule.least_gain)
    return np.flatnonzero(is_behind.mean(0) < rule.confidence)


def clearly_faster(speeds: Speeds, than: int, rule: Rule) -> NDArray[np.intp]:
    """Places of those that are faster than one of them, with confidence, by more than the least gain."""
    if speeds.resampled is None:
        return np.arange(0)
    is_faster = _behind(speeds.resampled, than) < -np.log1p(rule.least_gain)
    return np.flatnonzero(is_faster.mean(0) >= rule.confidence)


def is_decided(speeds: Speeds, rule: Rule) -> bool:
    """Whether all that race are as fast as the leader, with confidence, but for the least gain."""
    if len(speeds.measured) == 1:
        return True
    if speeds.resampled is None:
        return False
    is_near = _behind(speeds.resampled, speeds.leader) <= np.log1p(rule.least_gain)
    return bool((is_near.mean(0) >= rule.confidence).all())


def winner(speeds: Speeds, nodes: Sequence[float], rule: Rule) -> int:
    """The leader, or the one of fewest nodes that is as fast but for the least gain.

    Where computing becomes the slower part, at some number of nodes, changes with what else a machine does.
    """
    near = np.flatnonzero(_behind(speeds.measured, speeds.leader) <= np.log1p(rule.least_gain))
    return min(near.tolist(), key=lambda place: (nodes[place], -speeds.measured[place]))


def unseen_share(tokens: Floats, seconds: Floats) -> float:
    """Return the fastest one's speed at prompts that had no part in choosing it, over the speed that it was chosen by.

    Each prompt is left out in turn. The fastest of many at few prompts is also the luckiest: this is at most 1.
    """
    if len(tokens) < 2:
        return 1.0
    all_tokens, all_seconds = tokens.sum(0), seconds.sum(0)
    chosen = ((all_tokens - tokens) / (all_seconds - seconds)).argmax(1)  # [prompts], by all other prompts
    prompts = np.arange(len(tokens))
    unseen = tokens[prompts, chosen].sum() / seconds[prompts, chosen].sum()
    return min(1.0, float(unseen / (all_tokens / all_seconds).max()))


def _behind(logs: Floats, leader: int) -> Floats:
    """How far everybody is behind the leader, in the same resample."""
    found: Floats = logs[..., leader, None] - logs
    return found
