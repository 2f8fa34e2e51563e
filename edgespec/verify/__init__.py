"""Verification finds the path that the target accepts, and the token after it. It knows no draft and no growth.

A walk goes down the tree from the root and yields each node whose row it reads, so no [nodes, vocab] exists. At
temperature 0 it follows the argmax. Above, there is one rule for each way of drawing children: coupled follows the
tokens that the text's noise draws, membership follows drawn tokens among the most probable ones, and rejection
(`rejection.py`) is multi-round speculative sampling. Each gives the distribution that plain decoding draws from.

Rejection keeps the rest of p and of q in float64 and sums it again in each round: where the draft puts all but
1e-14 on one token, one minus the rejected mass would be rounding error.

On a CPU the tokens are those of plain decoding: in bf16, where one bit decides a near tie, all of a row's sums keep
their order (`offload/layouts/onednn.py`, `model/attention.py`). On a card rows of a tree round differently from
single ones: `near_ties.py` says which choices that may turn, so that such a row can be read as plain decoding reads it.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """The result of a verify pass, which is never less than one token."""

    path: tuple[int, ...]  # accepted nodes below the root, from the top
    next_token: int  # drawn where the path ends: the next root
    is_near_tie: bool = False  # whether another one may be right by plain decoding's row


# A tree that is being verified: it yields each node whose row it reads next
Verification: TypeAlias = Generator[int, None, Acceptance]


def accept_alone(verification: Verification) -> Acceptance:
    """Verify one tree whose rows are computed one after the other, as they are read."""
    try:
        while True:
            next(verification)
    except StopIteration as end:
        acceptance: Acceptance = end.value
        return acceptance
