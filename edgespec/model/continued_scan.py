"""Mamba 1's scan of many rows that go on from a state, which transformers' own function forgets.

Legend: b texts, c channels, n rows, k numbers of a channel's state.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
SCAN, STEP = "mamba_selective_scan", "mamba_selective_state_update"

_before: ContextVar[Tensor | None] = ContextVar("before", default=None)


def continued(state: Tensor | None, call: Callable[[], Result]) -> Result:
    """Return what a call gives whose scans go on from a state [b, c, k]; with None, they are transformers'."""
    before = _before.get()
    try:
        _before.set(state)
        return call()
    finally:
        _before.set(before)


def let_scans_continue(family: ModuleType) -> None:
    """Let the scan of a family's module, if it has one, go on from the state that `continued` gives."""
    names = vars(family)
    if SCAN in names and not hasattr(names[SCAN], "is_edgespecs"):
        names[SCAN] = _continued(names[SCAN], names[STEP])


def _continued(plain: Callable[..., Any], step: Callable[..., Tensor]) -> Callable[..., Any]:
    """Return Mamba 1's scan [b, c, n] of rows that go on from a state, which transformers' `plain` one forgets.

    Each row is a single `step` of transformers' own.
    """

    @functools.wraps(plain)
    def scan(inputs: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **named: Any) -> Any:  # noqa: N803
        before = _before.get()
        if before is None:
            return plain(inputs, dt, A, B, C, **named)
        state, gate = before.clone(), named.get("z")
        rows = [
            step(
                *(state, inputs[..., row], dt[..., row], A, B[..., row], C[..., row]),
                D=named.get("D"),
                z=None if gate is None else gate[..., row],
                dt_bias=named.get("delta_bias"),
                dt_softplus=named.get("delta_softplus", False),
            )
            for row in range(inputs.shape[2])
        ]
        found = torch.stack(rows, 2)
        return (found, state) if named.get("return_last_state") else found

    scan.is_edgespecs = True  # type: ignore[attr-defined]
    return scan
