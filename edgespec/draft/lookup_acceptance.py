"""How often what followed a sequence of tokens before follows it again: a small table, learned while a text is written.

A place is told by the tokens that match before it, by how often the continuation has followed them, and by its share
of all that has. Priors are those of held-out Python sources: `python -m scripts.make.lookup_priors` prints them.
"""

from __future__ import annotations

from bisect import bisect_right

MATCHES = (2, 3, 4, 6, 9, 14, 24, 48)  # tokens from which a class of matches begins; the first begins at 1
NUM_KINDS = 6  # of continuations: the only one, seen once, twice or more, often; most, many, few of several
# Of each class of matches by each kind of continuation
PRIORS = (
    (0.25, 0.47, 0.75, 0.37, 0.14, 0.06),
    (0.47, 0.72, 0.88, 0.42, 0.18, 0.06),
    (0.55, 0.81, 0.90, 0.29, 0.16, 0.10),
    (0.64, 0.82, 0.97, 0.38, 0.22, 0.06),
    (0.71, 0.90, 0.98, 0.40, 0.18, 0.12),
    (0.81, 0.91, 0.95, 0.43, 0.18, 0.11),
    (0.89, 0.96, 0.97, 0.46, 0.14, 0.11),
    (0.91, 0.99, 0.97, 0.46, 0.23, 0.11),
    (0.94, 0.99, 0.97, 0.46, 0.23, 0.11),
)
PRIOR_TOKENS = 6.0  # that a prior counts for
REMEMBERED = 48.0  # tokens of a class: beyond, old ones count for less
OFTEN = 4  # times
MOST, MANY = 0.6, 0.25  # of all that followed


class LookupAcceptance:
    """The chances of continuations in one text."""

    __slots__ = ("_chances", "_hits", "_totals")

    def __init__(self) -> None:
        self._chances = [chance for row in PRIORS for chance in row]
        self._hits = [PRIOR_TOKENS * chance for chance in self._chances]
        self._totals = [PRIOR_TOKENS] * len(self._chances)

    def chance(self, cell: int) -> float:
        """Return the chance that a continuation of this class follows."""
        return self._chances[cell]

    def learn(self, cell: int, *, is_hit: bool) -> None:
        """Note whether one did."""
        hits, total = self._hits[cell] + is_hit, self._totals[cell] + 1.0
        if total > REMEMBERED:
            hits, total = hits * REMEMBERED / total, REMEMBERED
        self._hits[cell], self._totals[cell] = hits, total
        self._chances[cell] = hits / total


def cell_of(match: int, count: int, total: int) -> int:
    """Return the class of what has followed `match` tokens `count` times, of `total` times that anything has."""
    if count == total:
        kind = 0 if count == 1 else 1 if count < OFTEN else 2
    else:
        share = count / total
        kind = 3 if share >= MOST else 4 if share >= MANY else 5
    return NUM_KINDS * bisect_right(MATCHES, match) + kind
