"""A weight as another program packed it: a matrix, or the matrices of a layer's experts.

Most checkpoints have tensors of their own for every expert, and transformers computes with all experts of a layer
in one parameter: each part is then one tensor that the experts' follow each other in. Some store the experts in one
tensor as they are. Both look the same here: n matrices of r rows and i columns, each packed by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from offload.checkpoint import Pieces
from offload.formats.even_steps import StepsInWords, has_kernel
from offload.formats.storage import EvenSteps, PackedStorage, PartShapes, StoredParameter, UnpackSome, rows_at_once

# Whose temporaries exist together. On a CPU they stay in its cache; a GPU is fastest in few and large steps.
WEIGHTS_AT_ONCE_ON_CPU = 1 << 18
WEIGHTS_AT_ONCE_ON_GPU = 1 << 22
TEMPORARY_BYTES = 24  # of a weight that is being unpacked: products, indices, scales

# parts [n, ...] -> some of the rows [n, r, i], each number rounded once from float32 to the dtype of the place
UnpackRows = Callable[[Mapping[str, Tensor], Tensor], None]


def weights_at_once(device: torch.device) -> int:
    """Return how many weights are unpacked in one go."""
    return WEIGHTS_AT_ONCE_ON_CPU if device.type == "cpu" else WEIGHTS_AT_ONCE_ON_GPU


def temporary_bytes(device: torch.device) -> int:
    """Return the bytes of the temporaries of unpacking, beside the weights."""
    return TEMPORARY_BYTES * weights_at_once(device)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPart:
    """One of the tensors that a matrix is packed as."""

    stored_name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    rows_dim: int | None  # the dimension that follows the matrix's rows, counted from the last; None: all need all
    rows_each: int  # rows of the matrix for one index of that dimension


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedWeight(PackedStorage):
    """The packing of one parameter."""

    name: str
    num_matrices: int
    parts: dict[str, StoredPart]
    unpack_rows: UnpackRows
    is_transposed: bool = False  # the parameter holds [i, r] of each matrix
    even_steps: EvenSteps | None = None
    scale_block: tuple[int, int] | None = None  # rows and columns that share a scale, of numbers of eight bits
    has_kernel: Callable[[torch.device, torch.dtype], bool] | None = None  # whether one unpacks, without temporaries

    @property
    def transposed(self) -> PublishedWeight | None:
        """The same of the matrices as they are packed, where the parameter holds them transposed."""
        return replace(self, is_transposed=False) if self.is_transposed else None

    def part_shapes(self, shape: tuple[int, ...]) -> PartShapes:
        """Return the parts' shapes as they are stored, the number of matrices in front where there are several."""
        front = () if len(shape) == 2 and self.num_matrices == 1 else (self.num_matrices,)
        return {name: ((*front, *part.shape), part.dtype) for name, part in self.parts.items()}

    def stored_names(self, parameter: str) -> dict[str, str]:
        """Return the names under which the parts were found."""
        return {name: part.stored_name for name, part in self.parts.items()}

    def of_share(self, shape: tuple[int, ...], num_shares: int) -> PublishedWeight | None:
        """Return how the matrices of one share are packed."""
        each, rest = divmod(self.num_matrices, num_shares)
        return None if rest or not each else replace(self, num_matrices=each)

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        """Try the card's kernel, if the format has one."""
        if device.type == "cuda" and self.has_kernel is not None:
            self.has_kernel(device, dtype)

    def unpack(self, parts: Mapping[str, Tensor], out: Tensor) -> Tensor:
        """Unpack a few rows at a time, which bounds the memory of temporaries: in float32, rounded once."""
        matrices = out.view(self.num_matrices, -1, out.shape[-1])
        if self.is_transposed:
            matrices = matrices.transpose(1, 2)
        whole = self.by_matrix(parts)
        for first, last, start, end in self._shares(*matrices.shape, out=out):
            share = {name: _rows(whole[name][first:last], part, start, end) for name, part in self.parts.items()}
            place = matrices[first:last, start:end]
            if not self.is_transposed:
                self.unpack_rows(share, place)
            else:
                products = torch.empty(place.shape, dtype=out.dtype, device=out.device)
                self.unpack_rows(share, products)
                place.copy_(products)
        return out

    def by_matrix(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the parts, or those of some matrices, with the number of matrices in front: [n, ...] each."""
        return {
            name: parts[name] if parts[name].dim() > len(part.shape) else parts[name][None]
            for name, part in self.parts.items()
        }

    def parts_of_rows(self, parts: Mapping[str, Tensor], start: int, end: int) -> dict[str, Tensor]:
        """Return what of the parts belongs to the rows [start, end) of each matrix."""
        whole = self.by_matrix(parts)
        return {name: _rows(whole[name], part, start, end).contiguous() for name, part in self.parts.items()}

    @property
    def unpack_some(self) -> UnpackSome | None:
        """What unpacks some rows of a matrix, whose parts have a row for each."""
        has_rows = all(part.rows_dim is not None and part.rows_each == 1 for part in self.parts.values())
        return self._unpack_some if has_rows and self.num_matrices == 1 and not self.is_transposed else None

    def _unpack_some(self, parts: Mapping[str, Tensor], rows: Tensor | slice, out: Tensor) -> Tensor:
        whole = self.by_matrix(parts)
        at_once = rows_at_once(weights_at_once(out.device), out.shape[-1])
        for start in range(0, len(out), at_once):
            place = out[start : start + at_once]
            if isinstance(rows, slice):
                first = rows.start + start
                share = {name: _rows(whole[name], part, first, first + len(place)) for name, part in self.parts.items()}
            else:
                some = rows[start : start + at_once]
                share = {name: whole[name].index_select(part.rows_dim or 0, some) for name, part in self.parts.items()}
            self.unpack_rows(share, place[None])
        return out

    def _shares(
        self, num_matrices: int, rows: int, columns: int, *, out: Tensor
    ) -> Iterator[tuple[int, int, int, int]]:
        """Yield which matrices and which of their rows are unpacked together."""
        if self.has_kernel is not None and not self.is_transposed and self.has_kernel(out.device, out.dtype):
            yield 0, num_matrices, 0, rows
            return
        at_once = weights_at_once(out.device)
        step = math.lcm(*(part.rows_each for part in self.parts.values()))
        num_rows = rows_at_once(at_once, columns, step=step)
        matrices_at_once = max(1, at_once // (rows * columns))
        for first in range(0, num_matrices, matrices_at_once):
            for start in range(0, rows, num_rows):
                yield first, min(first + matrices_at_once, num_matrices), start, min(start + num_rows, rows)


def _rows(tensor: Tensor, part: StoredPart, start: int, end: int) -> Tensor:
    """Return what of a part belongs to rows [start, end)."""
    if part.rows_dim is None:
        return tensor
    first = start // part.rows_each
    return tensor.narrow(part.rows_dim, first, -(-end // part.rows_each) - first)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMatrices:
    """The stored tensors of a parameter, which belong together: as many of each part as there are matrices."""

    parameter: StoredParameter
    num_matrices: int
    rows: int
    columns: int
    tensors: dict[str, tuple[str, tuple[int, ...], torch.dtype]]  # part -> stored name, shape of a matrix's, dtype

    def part(self, name: str, *shapes: tuple[int, ...], rows_dim: int | None = None, rows_each: int = 1) -> StoredPart:
        """Return a part that has one of these shapes; raises CheckpointError where it has another."""
        stored_name, shape, dtype = self.tensors[name]
        if shape not in shapes:
            needed = " or ".join(str(list(possible)) for possible in dict.fromkeys(shapes))
            raise self.parameter.cannot_be_used(
                f"'{stored_name}' has shape {list(shape)}, and {self.rows} rows of {self.columns} columns need {needed}"
            )
        return StoredPart(stored_name=stored_name, shape=shape, dtype=dtype, rows_dim=rows_dim, rows_each=rows_each)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a part, of one matrix."""
        return self.tensors[name][1]

    def num_groups(self, *, are_equal: bool = True) -> int:
        """Return how many groups of inputs have scales of their own; raises CheckpointError where they do not fit."""
        groups = self.shape("scales")[0] if self.shape("scales") else 0
        if not groups or (are_equal and self.columns % groups):
            raise self.parameter.cannot_be_used(f"{self.columns} columns are no {groups} equal groups")
        return groups

    def even_weight(
        self, name: str, parts: dict[str, StoredPart], words: StepsInWords, *, num_groups: int, in_order: bool = True
    ) -> PublishedWeight:
        """Return the parameter as these parts in a format of even steps."""
        found = replace(self.weight(name, parts, words.unpack), has_kernel=has_kernel)
        even_steps = EvenSteps(
            num_matrices=self.num_matrices,
            bits=words.bits,
            num_groups=num_groups,
            in_order=in_order,
            scales=words.scales,
            is_middle=words.is_middle,
            read=lambda stored: words.read(found.by_matrix(stored)),
        )
        return replace(found, even_steps=even_steps)

    def weight(
        self, name: str, parts: dict[str, StoredPart], unpack_rows: UnpackRows, *, is_transposed: bool = False
    ) -> PublishedWeight:
        """Return the parameter as these parts in a format; `is_transposed`: it holds [i, r] of each matrix."""
        return PublishedWeight(
            name=name, num_matrices=self.num_matrices, parts=parts, unpack_rows=unpack_rows, is_transposed=is_transposed
        )


def stored_matrices(
    parameter: StoredParameter, names: Mapping[str, str], *, is_transposed: bool = False
) -> StoredMatrices:
    """Return the tensors of these names, part -> name; raises CheckpointError where they do not belong together."""
    shape = parameter.shape
    missing = next((name for name in names.values() if name not in parameter.stored), None)
    if missing is not None:
        raise parameter.cannot_be_used(f"'{missing}' is missing")
    pieces = {part: parameter.stored[name] for part, name in names.items()}
    num_pieces = {len(found) for found in pieces.values()}
    if num_pieces != {1}:
        _check_same_owners(parameter, pieces)
    is_fused = len(shape) == 3
    num_stored = max(num_pieces)
    num_matrices = shape[0] if is_fused and num_stored == 1 else num_stored
    all_rows = math.prod(shape[:-1])
    if num_stored > 1 and (all_rows % num_stored or (is_fused and num_stored % shape[0])):
        owner = pieces[next(iter(pieces))][0].name
        raise parameter.cannot_be_used(f"{num_stored} tensors like '{owner}' cannot make up shape {list(shape)}")
    tensors = {}
    for part, found in pieces.items():
        odd = next((piece for piece in found if (piece.shape, piece.dtype) != (found[0].shape, found[0].dtype)), None)
        if odd is not None:
            raise parameter.cannot_be_used(
                f"'{odd.name}' is {list(odd.shape)} of {odd.dtype}, unlike '{found[0].name}'"
            )
        stored_shape = found[0].shape
        if is_fused and num_stored == 1:
            if stored_shape[:1] != shape[:1]:
                raise parameter.cannot_be_used(f"'{found[0].name}' is not of {shape[0]} experts: {list(stored_shape)}")
            stored_shape = stored_shape[1:]
        tensors[part] = (names[part], stored_shape, found[0].dtype)
    rows, columns = all_rows // num_matrices, shape[-1]
    if is_transposed:
        rows, columns = columns, rows
    return StoredMatrices(parameter=parameter, num_matrices=num_matrices, rows=rows, columns=columns, tensors=tensors)


def _check_same_owners(parameter: StoredParameter, pieces: Mapping[str, Pieces]) -> None:
    """Raise CheckpointError where one of the matrices lacks a part that others have."""
    owners = {part: [piece.name.rpartition(".")[0] for piece in found] for part, found in pieces.items()}
    every = list(dict.fromkeys(owner for found in owners.values() for owner in found))
    for part, found in owners.items():
        lacking = next((owner for owner in every if owner not in set(found)), None)
        if lacking is not None:
            leaf = pieces[part][0].name.rpartition(".")[2]
            raise parameter.cannot_be_used(f"'{lacking}.{leaf}' is missing")
