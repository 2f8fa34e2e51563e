"""Packed weights whose parameter holds them transposed, as gpt-oss' experts are: packed by rows of the transposed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from offload.formats.storage import PackedStorage, PartShapes, StoredParameter

FIELD = "turned"  # in the names of the parts, which files have


@dataclass(frozen=True, slots=True, kw_only=True)
class Transposed(PackedStorage):
    """The storage of a parameter, by that of its transposed."""

    transposed: PackedStorage

    @property
    def name(self) -> str:
        """The name of the format."""
        return self.transposed.name

    def part_shapes(self, shape: tuple[int, ...]) -> PartShapes:
        """Return the parts of the transposed."""
        return self.transposed.part_shapes(transposed_shape(shape))

    def stored_names(self, parameter: str) -> dict[str, str]:
        """Return the names of the parts, which say that they are the transposed's."""
        return self.transposed.stored_names(f"{parameter}.{FIELD}")

    def of_share(self, shape: tuple[int, ...], num_shares: int) -> Transposed | None:
        """Return the same of the transposed's storage for a share of the experts."""
        share = self.transposed.of_share(transposed_shape(shape), num_shares)
        return None if share is None else Transposed(transposed=share)

    def unpack(self, parts: Mapping[str, Tensor], out: Tensor) -> Tensor:
        """Unpack the transposed, and copy it."""
        whole = out.new_empty(transposed_shape(tuple(out.shape)))
        return out.copy_(self.transposed.unpack(parts, whole).mT)


def transposed_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of matrices with rows and columns exchanged."""
    return (*shape[:-2], shape[-1], shape[-2])


def detect_transposed(
    detect: Callable[[StoredParameter], PackedStorage | None], weight: StoredParameter
) -> Transposed | None:
    """Return how a parameter's transposed is stored, in what `detect` finds."""
    if len(weight.shape) == 1:
        return None
    found = detect(replace(weight, name=f"{weight.name}.{FIELD}", shape=transposed_shape(weight.shape)))
    return None if found is None else Transposed(transposed=found)
