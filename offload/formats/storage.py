"""How packed weights are stored: a format finds them; a weight's storage knows its parts, and unpacks them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from offload.checkpoint import Pieces, TensorEntry
from offload.errors import CheckpointError

BLOCK_SIZE = 64  # bitsandbytes' own choice
WEIGHTS_AT_ONCE = 1 << 20  # whose temporaries exist together while a weight is packed
# The shape of a state, which is read once and never streamed: its length depends on the digits of its numbers.
STATE = ((0,), torch.uint8)

# parts, rows of a matrix by number or from the first up to the second, place [n, i] -> the place
UnpackSome = Callable[[Mapping[str, Tensor], Tensor | slice, Tensor], Tensor]
PartShapes = dict[str, tuple[tuple[int, ...], torch.dtype]]  # part, or its name in a checkpoint -> (shape, dtype)


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
class Steps:
    """Weights in even steps: (number - zero) times scale, for each group of columns."""

    numbers: Tensor  # uint8 [n, r, i]
    zeros: Tensor  # int16 [n, r, G], or int8 where that holds them; float32 where they are no whole numbers
    scale: Tensor  # float32 [n, r, G]; float16 where groups are given, and whose product with bf16 is float32
    groups: Tensor | None = None  # int64 [n, i]: each column's group, where groups are no neighbours


@dataclass(frozen=True, slots=True, kw_only=True)
class EvenSteps:
    """A packed weight's even steps: how many there are, and what reads them from the weight's parts."""

    num_matrices: int
    bits: int
    num_groups: int  # of columns that share a scale and a zero
    in_order: bool  # the columns of a group are neighbours
    read: Callable[[Mapping[str, Tensor]], Steps]  # parts [n, ...], or some of the matrices'
    scales: torch.dtype | None = None  # float16 or bf16, where zeros are whole numbers; None: others, or other scales
    is_middle: bool = False  # whether all zeros are half of all numbers
    numbers: frozenset[int] | None = None  # all that occur, less their zero: the least one's place is 0


class PackedStorage(Protocol):
    """How one weight is stored: as several parts, which stream like any other parameters."""

    @property
    def name(self) -> str:
        """The format's name for users."""

    @property
    def variant(self) -> str:
        """What weights that are packed here differ in from one machine to another; empty where nothing does."""
        return ""

    @property
    def even_steps(self) -> EvenSteps | None:
        """The weight's steps, where they are even and others than the format's own."""
        return None

    @property
    def transposed(self) -> PackedStorage | None:
        """How the weight's transposed is stored in the same parts, where that is unpacked sooner than the weight."""
        return None

    @property
    def unpack_some(self) -> UnpackSome | None:
        """What unpacks some rows of a matrix alone; None where the format does not."""
        return None

    def part_shapes(self, shape: tuple[int, ...]) -> PartShapes:
        """Return the parts of a weight of this shape."""

    def stored_names(self, parameter: str) -> dict[str, str]:
        """Return part -> its name in a checkpoint."""

    def of_share(self, shape: tuple[int, ...], num_shares: int) -> PackedStorage | None:
        """Return how an equal share of such a weight's first dimension is stored, whose parts are as equal shares.

        None where shares have parts in common. Here each expert is packed by itself.
        """
        return self if len(shape) > 2 and shape[0] % num_shares == 0 else None

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        """Compile and try what unpacks weights on a card, so that the first pass need not."""
        return

    def unpack(self, parts: Mapping[str, Tensor], out: Tensor) -> Tensor:
        """Return the weight, written to `out` in the dtype of `out`."""


class Quantizer(PackedStorage, Protocol):
    """The storage of weights that are rounded here; it describes those before there are any."""

    def packs(self, shape: tuple[int, ...]) -> bool:
        """Return whether a matrix of this shape can be packed: here if it has whole blocks."""
        return math.prod(shape) % BLOCK_SIZE == 0

    def states(self, parameter: str, shape: tuple[int, ...]) -> dict[str, bytes]:
        """Return the states that are stored beside the parts: name in a checkpoint -> content.

        They are read once and never streamed. Here the parts say everything.
        """
        return {}

    def for_shares(self, shape: tuple[int, ...], num_shares: int) -> Quantizer:
        """Return what packs equal shares of such a weight's first dimension with no parts in common, where it can."""
        return self

    def pack(self, weight: Tensor) -> tuple[Quantizer, dict[str, Tensor]]:
        """Return the weight's own storage, and its parts, on the weight's device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageFormat:
    """A format of packed weights: what finds them, in files and in config.json."""

    name: str  # for users
    methods: tuple[str, ...] = ()  # the `quant_method` values in config.json of checkpoints in this format
    # How the checkpoint packs a parameter; None where it is not in this format. Raises CheckpointError where the
    # parameter is in this format and cannot be unpacked.
    detect: Callable[[StoredParameter], PackedStorage | None]
    leaves: tuple[str, ...] = ()  # names of the tensors beside a module's `weight` that a packed weight is made of
    # rows, columns, what config.json states -> a matrix's parts by leaf; None of what another format stores
    planned: Callable[[int, int, Mapping[str, Any]], PartShapes | None] | None = None
    # What config.json states -> why a checkpoint of its methods is not read; None where it is
    refused: Callable[[Mapping[str, Any]], str | None] | None = None


def stored_shapes(packer: Quantizer, parameter: str, shape: tuple[int, ...]) -> PartShapes:
    """Return stored name -> (shape, dtype) of a weight's parts and states."""
    return named_shapes(packer, parameter, shape) | dict.fromkeys(packer.states(parameter, shape), STATE)


def named_shapes(packing: PackedStorage, parameter: str, shape: tuple[int, ...]) -> PartShapes:
    """Return stored name -> (shape, dtype) of a weight's parts."""
    shapes = packing.part_shapes(shape)
    return {name: shapes[part] for part, name in packing.stored_names(parameter).items()}


def shapes_bytes(shapes: PartShapes) -> int:
    """Return the bytes of all parts."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes.values())


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
