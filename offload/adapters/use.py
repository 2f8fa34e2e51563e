"""Which adapters the rows that pass a module now are to have: those of their texts."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar

from offload.errors import OffloadError

AdapterUse = tuple[tuple[str, float], ...]  # names of adapters, in the order of their sums, and what scales them
Run = tuple[AdapterUse, int]  # of rows that follow each other, and their number

# The rows that pass now; nothing stands for rows without an adapter
rows_under_way: ContextVar[Sequence[Run]] = ContextVar("rows_under_way", default=())


def runs_of(uses: Sequence[Run]) -> Sequence[Run]:
    """Return the runs of rows as `rows_under_way` has them: nothing where no row has an adapter."""
    return uses if any(use for use, _ in uses) else ()


def refused(what: str, fix: str) -> OffloadError:
    """Return the error of an adapter."""
    return OffloadError("E_ADAPTER", what, fix)
