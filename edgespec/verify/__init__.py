"""Verification finds the path that the target accepts, and the token behind it. It knows no draft and no growth."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """The result of a verify pass, which is never less than one token."""

    path: tuple[int, ...]  # accepted nodes below the root, from the top
    next_token: int  # drawn where the path ends: the next root
