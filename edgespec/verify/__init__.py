"""Verification: which path of a tree the target accepts, and the token behind it. Knows no draft and no growth."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """What a verify pass yields: never less than one token."""

    path: tuple[int, ...]  # accepted nodes below the root, from the top
    next_token: int  # drawn where the path ends: the next root
