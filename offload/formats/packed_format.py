"""The interface of a packed format: it is found by its tensors, laid out, packed where we can, and unpacked."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from offload.checkpoint import TensorEntry
from offload.errors import CheckpointError
from offload.stored_names import Pieces

BLOCK_SIZE = 64  # bitsandbytes' own choice
WEIGHTS_AT_ONCE = 1 << 20  # whose temporaries exist together while a weight is packed
# A processor's kernel multiplies at least so many: with unpacked weights a tree's row would have other bits than alone
TREE_ROWS = 80
# The layout of a state, which is read once and never streamed: its length depends on the digits of its numbers.
STATE = ((0,), torch.uint8)

# parts, rows of a matrix by number or from the first up to the second, place [n, i] -> the place
UnpackSome = Callable[[Mapping[str, Tensor], Tensor | slice, Tensor], Tensor]
Layouts = dict[str, tuple[tuple[int, ...], torch.dtype]]  # part, or its name in a checkpoint -> (shape, dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredParameter:
    """A parameter of a model, and the tensors that a checkpoint may hold it in."""

    name: str
    shape: tuple[int, ...]
    stored: Mapping[str, Pieces]  # all of the checkpoint's
    stated: Mapping[str, Any]  # the packing, as config.json describes it

    def sibling(self, leaf: str) -> str:
        """Return the name of a part beside the parameter; those of fused experts stand below it."""
        return f"{self.name.removesuffix('.weight')}.{leaf}"

    def has(self, leaf: str) -> bool:
        """Return whether a part is stored beside the parameter."""
        return self.sibling(leaf) in self.stored

    def dtype_of(self, name: str) -> torch.dtype | None:
        """Return the dtype of a stored tensor; None where there is none of this name."""
        return self.stored[name][0].dtype if name in self.stored else None

    def cannot_be_used(self, reason: str) -> CheckpointError:
        """Return the error for the parameter in a packing that is not understood."""
        return cannot_be_used(self.name, reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """What multiplies rows with a packed weight; unpacking it is faster for more rows than `max_rows`.

    A weight whose kernel takes any number of rows is never unpacked.
    """

    multiply: Callable[[Mapping[str, Any], Tensor, Tensor | None], Tensor]  # parts, rows [..., i], bias -> [..., r]
    max_rows: int = sys.maxsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Weights in even steps: (number - zero) times scale, for each group of columns."""

    numbers: Tensor  # uint8 [n, r, i]
    zeros: Tensor  # int16 [n, r, G], or int8 where that holds them; float32 where they are no whole numbers
    scale: Tensor  # float32 [n, r, G]; float16 where groups are given, and whose product with bf16 is float32
    groups: Tensor | None = None  # int64 [n, i]: each column's group, where groups are no neighbours


@dataclass(frozen=True, slots=True, kw_only=True)
class EvenSteps:
    """A packed weight's even steps: their form, and what reads them from the weight's parts."""

    num_matrices: int
    bits: int
    num_groups: int  # of columns that share a scale and a zero
    in_order: bool  # the columns of a group are neighbours
    read: Callable[[Mapping[str, Tensor]], Steps]  # parts [n, ...], or some of the matrices'
    numbers: frozenset[int] | None = None  # all that occur, less their zero: the least one's place is 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptWeight:
    """A packed weight in another format with the same numbers, and what makes its parts from those that are stored."""

    packing: Packing
    repack: Callable[[str, Mapping[str, Tensor]], dict[str, Tensor]]  # the parameter's name, stored parts -> parts


class Packing(Protocol):
    """The way in which one weight is packed: as several parts, which stream like any other parameters."""

    @property
    def name(self) -> str:
        """The format's name for users."""

    @property
    def even_steps(self) -> EvenSteps | None:
        """The weight's steps, where they are even and others than the format's own."""

    @property
    def turned(self) -> Packing | None:
        """How the weight's transposed is packed in the same parts, where that is unpacked sooner than the weight."""

    @property
    def unpack_some(self) -> UnpackSome | None:
        """What unpacks some rows of a matrix alone; None where the format does not."""

    def part_shapes(self, shape: tuple[int, ...]) -> Layouts:
        """Return the parts of a weight of this shape."""

    def stored_names(self, parameter: str) -> dict[str, str]:
        """Return part -> its name in a checkpoint."""

    def of_share(self, shape: tuple[int, ...], num_shares: int) -> Packing | None:
        """Return how an equal share of such a weight's first dimension is packed, whose parts are as equal shares.

        None where shares have parts in common.
        """

    def unpack(self, parts: Mapping[str, Tensor], out: Tensor) -> Tensor:
        """Return the weight, written to `out` in the dtype of `out`."""

    def kernel(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Kernel | None:
        """Return what multiplies rows of this dtype with such a weight as it is packed; None where nothing does."""


class PackedFormat(Protocol):
    """A format that checkpoints are published in."""

    @property
    def name(self) -> str:
        """The format's name for users."""

    @property
    def methods(self) -> tuple[str, ...]:
        """The `quant_method` values in config.json of checkpoints in this format."""

    @property
    def detect(self) -> Callable[[StoredParameter], Packing | None]:
        """Return how the checkpoint packs a parameter; None where it is not in this format.

        Raises CheckpointError where the parameter is in this format and cannot be unpacked.
        """


class Keeper(PackedFormat, Packing, Protocol):
    """A format that packed weights may keep their numbers in."""

    @property
    def variant(self) -> str:
        """What packed weights differ in from one machine to another; empty where nothing does."""

    def keeping(self, packing: Packing, shape: tuple[int, ...]) -> KeptWeight | None:
        """Return how a weight in another packing keeps its numbers; None where they are rounded to others."""


class Packer(Keeper, Protocol):
    """A format that weights are packed in here; it describes those before there are any."""

    def packs(self, shape: tuple[int, ...]) -> bool:
        """Return whether a matrix of this shape can be packed."""

    def states(self, parameter: str, shape: tuple[int, ...]) -> dict[str, bytes]:
        """Return the states that are stored beside the parts: name in a checkpoint -> content.

        It is read once and never streamed.
        """

    def for_shares(self, shape: tuple[int, ...], num_shares: int) -> Packer:
        """Return the format that packs equal shares of such a weight's first dimension with no parts in common.

        Where the format cannot do that, it is the same.
        """

    def pack(self, weight: Tensor) -> tuple[Packer, dict[str, Tensor]]:
        """Return the weight's own format, and its parts, on the weight's device."""


def stored_layout(packer: Packer, parameter: str, shape: tuple[int, ...]) -> Layouts:
    """Return stored name -> (shape, dtype) of a weight's parts and states."""
    return parts_layout(packer, parameter, shape) | dict.fromkeys(packer.states(parameter, shape), STATE)


def parts_layout(packing: Packing, parameter: str, shape: tuple[int, ...]) -> Layouts:
    """Return stored name -> (shape, dtype) of a weight's parts."""
    layouts = packing.part_shapes(shape)
    return {name: layouts[part] for part, name in packing.stored_names(parameter).items()}


def layouts_bytes(layouts: Layouts) -> int:
    """Return the bytes of all parts."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in layouts.values())


def rows_at_once(num_weights: int, columns: int, *, step: int = 1) -> int:
    """Return the rows of a matrix that have about so many weights: a multiple of `step`, at least one."""
    return max(step, num_weights // columns // step * step)


def cannot_be_used(parameter: str, reason: str) -> CheckpointError:
    """Return the error for a packed weight of a checkpoint."""
    return CheckpointError(
        "E_QUANTIZED",
        f"the quantised weight '{parameter}' cannot be used: {reason}.",
        "Download the model again, or use its bf16 or fp16 safetensors, with `quant=nf4` or int8.",
    )


def content_of(entry: TensorEntry) -> bytes:
    """Return the bytes of a small tensor; none where it is only planned."""
    if entry.is_planned:
        return b""
    with entry.file.open("rb") as file:
        file.seek(entry.offset)
        return file.read(entry.num_bytes)
