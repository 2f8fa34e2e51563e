"""Whether a draft agrees more with its target in one reading than in another, token by token.

The tokens are the same, so what decides is each one's difference. How alike two distributions are is measured by
the sum of sqrt(p q), which varies less from token to token than what is accepted, the sum of min(p, q): with as many
tokens, smaller losses are seen. Differences that are sure and do not pay are left alone: they are of the text as often
as of the draft. So what changes a reading has to pay surely, too: in parts of the text, because neighbours are alike.
Legend: t tokens, m parts of a text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

CHANCE = 0.001  # by which one of two readings that are alike may seem better: of each that is tried
PART = 8  # tokens of a text that count as one
LEAST_GAIN = 0.01  # tokens of the two depths, below which another reading changes nothing that anybody would notice
ROUNDING = 1e-5  # of what two distributions share


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shared:
    """What a draft's distributions q and its target's p have in common, after each token."""

    accepted: Tensor  # [t], the sum of min(p, q): the chance that a token that the draft draws is accepted
    affinity: Tensor  # [t], the sum of sqrt(p q)

    def beside(self, other: Shared) -> Shared:
        """Return what is in common after these tokens and after those of another text."""
        return Shared(
            accepted=torch.cat([self.accepted, other.accepted]), affinity=torch.cat([self.affinity, other.affinity])
        )

    def plus(self, other: Shared) -> Shared:
        """Return what both have together, after the tokens that the other has too."""
        count = other.accepted.shape[0]
        return Shared(accepted=self.accepted[:count] + other.accepted, affinity=self.affinity[:count] + other.affinity)


def agrees_more(ours: Shared, theirs: Shared) -> bool:
    """Return whether more is accepted in a reading than in another: enough to pay, and more than chance explains."""
    return pays(ours, theirs) and is_surely_closer(ours, theirs)


def surely_agrees_more(ours: Shared, theirs: Shared, *, num_tried: int) -> bool:
    """Return whether a reading is better by more than chance and the choice of a text explain.

    The best of `num_tried` readings is better by chance so many times as often as one. Of what is gained, half of the
    least that pays has to be sure in parts of the text [m]: a healthy draft may gain as much from a text of one kind.
    """
    gains = torch.stack([part.mean() for part in (ours.accepted - theirs.accepted).split(PART)])
    chances = (_chance_of_mean(gains - LEAST_GAIN / 2), chance_of(ours.affinity - theirs.affinity))
    return pays(ours, theirs) and max(chances) < CHANCE / max(1, num_tried)


def _chance_of_mean(found: Tensor) -> float:
    """Return how likely numbers [m] around 0 have a mean as large: Student's t, by a normal tail that is as likely."""
    more = found.numel() - 1
    if more < 1:
        return 1.0
    mean, error = float(found.mean()), float(found.std()) / math.sqrt(found.numel())
    if error < ROUNDING * abs(mean):
        return float(mean <= 0)
    t = mean / error
    return math.erfc(t * (1 - 1 / (4 * more)) / math.sqrt(1 + t * t / (2 * more)) / math.sqrt(2)) / 2


def gain_of(ours: Shared, theirs: Shared) -> float:
    """Return how many more tokens are accepted in a reading than in another."""
    return float((ours.accepted - theirs.accepted).mean())


def pays(ours: Shared, theirs: Shared) -> bool:
    """Return whether enough more is accepted in a reading than in another that somebody would notice."""
    return gain_of(ours, theirs) >= LEAST_GAIN


def is_surely_closer(ours: Shared, theirs: Shared) -> bool:
    """Return whether a reading is closer to the target than another by more than chance explains."""
    return chance_of(ours.affinity - theirs.affinity) < CHANCE


def chance_of(differences: Tensor) -> float:
    """Return how likely chance alone makes differences [t] as large as these.

    By Wilcoxon's signed-rank test: a difference counts by its rank among all, so that no single token outweighs the
    others; equal ones share their ranks. The tail is the normal one, which ten tokens and more allow.
    """
    found = differences[differences.abs() > ROUNDING]
    if not found.numel():
        return 1.0
    _, which, counts = found.abs().unique(return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0) - (counts - 1) / 2)[which].double()
    score = float((ranks * found.sign()).sum()) / math.sqrt(float(ranks.square().sum()))
    return math.erfc(score / math.sqrt(2)) / 2
