"""Verification finds the path that the target accepts, and the token behind it. It knows no draft and no growth."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """The result of a verify pass, which is never less than one token."""

    path: tuple[int, ...]  # accepted nodes below the root, from the top
    next_token: int  # drawn where the path ends: the next root


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
