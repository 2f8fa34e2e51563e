"""Packed weights whose parameter holds them transposed, as gpt-oss' experts are: packed by rows of the transposed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from offload.formats.packed_format import Layouts, PackedFormat, Packing, StoredParameter

FIELD = "turned"  # in the names of the parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Turned:
    """The packing of a parameter, by that of its transposed."""

    turned: Packing
    even_steps: None = None
    unpack_some: None = None

    @property
    def name(self) -> str:
        """The name of the format."""
        return self.turned.name

    def part_shapes(self, shape: tuple[int, ...]) -> Layouts:
        """Return the parts of the transposed."""
        return self.turned.part_shapes(transposed(shape))

    def stored_names(self, parameter: str) -> dict[str, str]:
        """Return the names of the parts, which say that they are the transposed's."""
        return self.turned.stored_names(f"{parameter}.{FIELD}")

    def of_share(self, shape: tuple[int, ...], num_shares: int) -> Turned | None:
        """Return the same of the transposed's packing for a share of the experts."""
        share = self.turned.of_share(transposed(shape), num_shares)
        return None if share is None else Turned(turned=share)

    def unpack(self, parts: Mapping[str, Tensor], out: Tensor) -> Tensor:
        """Unpack the transposed, and copy it."""
        whole = out.new_empty(transposed(tuple(out.shape)))
        return out.copy_(self.turned.unpack(parts, whole).mT)

    def kernel(self, shape: tuple[int, ...], dtype: object, device: object) -> None:
        """Return None: only rows of the transposed's packing are multiplied."""


def transposed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of matrices with rows and columns exchanged."""
    return (*shape[:-2], shape[-1], shape[-2])


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnedFormat:
    """The weights that another format has transposed."""

    of: PackedFormat
    methods: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name of the format."""
        return self.of.name

    @property
    def detect(self) -> Callable[[StoredParameter], Turned | None]:
        """Return what finds the parts of the transposed."""
        return partial(_detect, self.of)


def _detect(of: PackedFormat, weight: StoredParameter) -> Turned | None:
    if len(weight.shape) == 1:
        return None
    found = of.detect(replace(weight, name=f"{weight.name}.{FIELD}", shape=transposed(weight.shape)))
    return None if found is None else Turned(turned=found)
