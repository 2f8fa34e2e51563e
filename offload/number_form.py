"""The form of a stored tensor whose numbers are not a parameter's: they are computed once, when it is loaded."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class NumberForm(Protocol):
    """How a tensor's bytes become a parameter's numbers; its entry is of bytes."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's shape."""

    def write(self, stored: Tensor, out: Tensor) -> None:
        """Write the numbers of uint8 [bytes] to `out` [numbers], computed in float32 and rounded once."""
