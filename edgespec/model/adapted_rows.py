"""Rows pass modules outside of layers with the adapters of their texts: tables, the last norm and the head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import TypeVar

from offload.adapters.use import Run, rows_under_way, runs_of

Result = TypeVar("Result")


def adapted(runs: Sequence[Run], call: Callable[[], Result]) -> Result:
    """Return the result of a call in which these rows pass modules.

    The call has a context of its own: wherever an interrupt ends it, the next one does not find these rows.
    """
    context = copy_context()
    context.run(rows_under_way.set, runs_of(runs))
    return context.run(call)
