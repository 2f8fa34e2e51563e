"""What a compute layout is: a device multiplies a weight as it lies there; a lossless one takes weights from elsewhere.

Each layout tries its kernel on a sample, and is used where that is right: a row has the same bits in any company.
"""

from __future__ import annotations

import sys
import timeit
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offload.formats.storage import PackedStorage, StoredParameter
from offload.native.weights import NativeWeight

# A processor's kernel multiplies at least so many: with unpacked weights a tree's row would have other bits than alone
TREE_ROWS = 80
# Whether all rows that pass now are multiplied as so few, however many they are: trees', and those of texts in company
stays_packed: ContextVar[bool] = ContextVar("stays_packed", default=False)
# Whether those that chose an expert are, of the chunk that passes; None: that goes by their number
experts_stay_packed: ContextVar[bool | None] = ContextVar("experts_stay_packed", default=None)
SAMPLE_ROWS = 7
NUM_TIMED = 5  # products
Multiply = Callable[[Mapping[str, Any], Tensor, Tensor | None], Tensor]  # parts, rows [..., i], bias -> [..., r]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """What multiplies rows with a packed weight; unpacking it is faster for more rows than `max_rows`.

    A weight whose kernel takes any number of rows is never unpacked.
    """

    multiply: Multiply
    max_rows: int = sys.maxsize
    of_any_rows: Multiply | None = None  # the same for a weight that is not unpacked; None: `multiply`
    # What takes the weight's parts where a whole pass is one native call; None where that cannot multiply by it
    native: Callable[[Mapping[str, Any]], NativeWeight] | None = None

    def takes(self, rows: Tensor) -> bool:
        """Return whether these rows [..., i] are multiplied with the packed weight where others unpack it."""
        return are_few(rows.numel() // rows.shape[-1], self.max_rows)

    def product(self, parts: Mapping[str, Any], rows: Tensor, bias: Tensor | None) -> Tensor:
        """Return rows [..., i] times the weight: at once no more than may share a product with one's bits."""
        if rows.numel() <= self.max_rows * rows.shape[-1]:
            return self.multiply(parts, rows, bias)
        flat = rows.reshape(-1, rows.shape[-1])
        found = in_pieces(lambda some: self.multiply(parts, some, bias), flat, self.max_rows)
        return found.view(*rows.shape[:-1], -1)


def are_few(num_rows: int, most: int) -> bool:
    """Return whether rows are multiplied as few, of which at most so many share a product."""
    return num_rows <= most or stays_packed.get()


def in_pieces(multiply: Callable[[Tensor], Tensor], rows: Tensor, most: int) -> Tensor:
    """Return products of rows [n, i], of which at most so many share one: [n, r]."""
    return multiply(rows) if len(rows) <= most else torch.cat([multiply(some) for some in rows.split(most)])


def is_right(product: Callable[[Tensor], Tensor], weight: Tensor, *, largest_error: float) -> bool:
    """Return whether products of rows are those of a weight [r, i], and a row's bits alone are those among others.

    The error counts beside the products' norm.
    """
    rows = torch.linspace(-1, 1, SAMPLE_ROWS * weight.shape[1]).sin_().view(SAMPLE_ROWS, -1)
    expected, found, alone = rows @ weight.T, product(rows), product(rows[4:5])
    return bool((found - expected).norm() <= largest_error * expected.norm()) and torch.equal(alone, found[4:5])


def fastest_s(multiply: Callable[[], Tensor]) -> float:
    """Return the least seconds of several products, which other programs disturb least: a number of each is read."""
    return min(timeit.repeat(lambda: multiply()[0, 0].item(), number=1, repeat=NUM_TIMED))


@dataclass(frozen=True, slots=True, kw_only=True)
class Repacked:
    """A packed weight in another layout with the same numbers, and what makes its parts from those that are stored."""

    storage: PackedStorage
    repack: Callable[[str, Mapping[str, Tensor]], dict[str, Tensor]]  # the parameter's name, stored parts -> parts


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeLayout:
    """One way in which devices multiply rows with packed weights."""

    own: PackedStorage  # how a new weight is stored in it
    # What multiplies rows of a dtype with a weight as it is stored; None of others, and where the device has none
    kernel: Callable[[PackedStorage, tuple[int, ...], torch.dtype, torch.device], Kernel | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LosslessLayout(ComputeLayout):
    """A layout that weights are put in as they are: in files, or when they are loaded."""

    # How a weight is put in it on a device when it is loaded, or in files (None), if that rounds none of its numbers
    repacked: Callable[[PackedStorage, tuple[int, ...], torch.device | None], Repacked | None]
    detect: Callable[[StoredParameter], PackedStorage | None]  # finds those in files
    # Several rows take longer than with the unpacked weight, which is used instead where it fits
    is_slow: bool = False
