"""How alike the rows of a text choose experts, from what was counted."""

import math
from collections.abc import Iterable

from profiles.experts import INDEPENDENT, MIN_SPREAD, Routing

HALVINGS = 40


def fit_spread(counted: Iterable[tuple[float, float]], *, num_experts: int, chosen: int, num_texts: int = 1) -> float:
    """Return the spread whose curve is no higher than lower, on the average of logarithms, than what was counted.

    `counted` are rows and distinct experts of a layer. Counts of a row a text say nothing. The spread is at most 1.
    """
    points = [(rows, distinct) for rows, distinct in counted if rows > num_texts and distinct > 0]

    def excess(spread: float) -> float:
        routing = Routing(num_experts=num_experts, chosen=chosen, spread=spread)
        return sum(math.log(routing.distinct(rows, num_texts=num_texts) / found) for rows, found in points)

    low, high = MIN_SPREAD, INDEPENDENT
    if not points or excess(high) <= 0:
        return high
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) < 0 else (low, middle)
    return high
